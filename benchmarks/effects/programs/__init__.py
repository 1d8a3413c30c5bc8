"""Programs as a user of each framework would write them from its documentation, all against one shop.

The environment variable `VARIANT` says what the program states beside the call itself, and `SHOP`
where the shop is.
"""
