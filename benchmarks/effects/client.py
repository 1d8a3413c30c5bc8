"""Client of the shop for all programs. A request without an answer raises `httpx.ReadTimeout`."""

from __future__ import annotations

import os

import httpx

VARIANT = os.environ.get("VARIANT", "nothing")
"""Declarations of the program in addition to the call: `nothing`, `once`, `retries`, `lookup` or
`keys`.
"""

_SHOP = httpx.Client(
    base_url=os.environ.get("SHOP", ""), timeout=2.0, headers={"process": str(os.getpid())}
)
_MISSING = 404
_SOLD_OUT = 409


class SoldOut(ValueError):
    """Permanently sold out."""


def charge(*, key: str = "", reference: str = "") -> str:
    """Charge the customer; the id of the charge.

    Args:
        key: an idempotency key: the shop makes one charge for each.
        reference: text by which the charge is found; it does not keep a second one from being made.
    """
    return _make("/charges", key, reference)


def book(what: str, *, key: str = "", reference: str = "") -> str:
    """Book a car, a hotel or a flight; the id of the booking. The arguments are those of `charge`.

    Raises:
        SoldOut: the shop does not have it.
    """
    return _make(f"/bookings/{what}", key, reference)


def find(reference: str) -> str | None:
    """Look for the charge or booking that was made with a reference; its id, or None."""
    response = _SHOP.get("/found", params={"reference": reference})
    if response.status_code == _MISSING:
        return None
    response.raise_for_status()
    return str(response.json()["id"])


def cancel(booking: str) -> None:
    """Cancel a booking; a second time has no effect."""
    _SHOP.delete(f"/bookings/{booking}").raise_for_status()


def _make(path: str, key: str, reference: str) -> str:
    response = _SHOP.post(path, headers={"idempotency-key": key, "reference": reference})
    if response.status_code == _SOLD_OUT:
        raise SoldOut("sold out")
    response.raise_for_status()
    return str(response.json()["id"])
