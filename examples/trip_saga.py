"""The trip from Temporal's tutorial about sagas: a car, a hotel and a flight, all of them or none. Run it as it is.

Each function states how to undo its booking, so no list of compensations is needed. When the booking of the flight fails, one
revision adds the tasks that cancel the hotel and the car. They run like all other tasks.
"""

import anyio

from replanning import Plan, ReplanningEngine, TransientError, tool

PLAN = Plan.parse("""
goal: {objective: Book a trip}
sequential: true
tasks:
  - {id: car, tool: book_car, arguments: {car: compact}}
  - {id: hotel, tool: book_hotel, arguments: {hotel: by the sea}}
  - {id: flight, tool: book_flight, arguments: {flight: LH 710}}
""")
BUSY = ["hotel"]


@tool(effect="reversible", undo={"tool": "undo_book_car", "arguments": {"car": "${arguments.car}"}})
def book_car(car: str) -> str:
    """Book a car."""
    print(f"booking car: {car}")
    return car


@tool(
    effect="reversible",
    undo={"tool": "undo_book_hotel", "arguments": {"hotel": "${arguments.hotel}"}},
    retry={"delay": 0},
)
def book_hotel(hotel: str) -> str:
    """Book a hotel, whose service is down at first."""
    if BUSY:
        BUSY.pop()
        raise TransientError("the hotel service is down")
    print(f"booking hotel: {hotel}")
    return hotel


@tool(effect="reversible")
def book_flight(flight: str) -> str:
    """Book a flight, which is sold out."""
    raise ValueError(f"{flight} is sold out")


@tool(idempotent=True)
def undo_book_car(car: str) -> None:
    """Cancel a car."""
    print(f"undoing booking of car: {car}")


@tool(idempotent=True)
def undo_book_hotel(hotel: str) -> None:
    """Cancel a hotel."""
    print(f"undoing booking of hotel: {hotel}")


async def main():
    """Book the trip; if that fails, undo the bookings."""
    engine = ReplanningEngine()
    tools = [book_car, book_hotel, book_flight, undo_book_car, undo_book_hotel]
    result = await engine.execute(PLAN, tools=tools, run_id="trip")
    if result.status == "failed":
        print(result.reason)
        engine.undo("trip", reason="the trip is off")
        result = await engine.execute(PLAN, tools=tools, run_id="trip")
    print(result.status, result.reason)
    for revision in result.revisions:
        print(f"revision {revision.number}: {revision.reason}")
    for effect in engine.history("trip").effects():
        print(f"{effect.task} was taken back by {effect.compensation}")


anyio.run(main)
