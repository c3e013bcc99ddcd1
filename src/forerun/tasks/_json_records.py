"""Records of the JSON extraction task: a schema, its values, and a text that states them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forerun.utils.text import joined

FIRST = ("Anna", "Bruno", "Clara", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas")
LAST = (
    "Berg",
    "Castillo",
    "Dubois",
    "Evans",
    "Fischer",
    "Grant",
    "Haddad",
    "Ito",
    "Jensen",
    "Kaur",
)
CITIES = ("Aarhus", "Bilbao", "Bristol", "Dresden", "Ghent", "Leeds", "Lyon", "Malmo", "Porto")
MONTHS = ("January", "March", "April", "June", "August", "September", "November", "December")
SKILLS = ("Python", "SQL", "Excel", "French", "accounting", "first aid", "welding", "German", "C++")
JOBS = ("data analyst", "nurse", "electrician", "translator", "baker", "bookkeeper", "librarian")
FIRMS = ("Norwind", "Halden & Sons", "Brightwater", "Quarry Lane", "Tellus", "Open Meadow")
ITEMS = ("desk lamp", "rain jacket", "coffee grinder", "office chair", "bicycle pump", "suitcase")
COLOURS = ("black", "white", "red", "green", "dark blue", "grey", "yellow")
TALKS = ("Soil and Water", "Reading Old Maps", "The Night Sky", "Bread at Home", "City Birds")
PLACES = ("the town library", "Room 12", "the old brewery", "the main hall", "the botanic garden")
FLOORS = ("ground", "first", "second", "third", "top")
EXTRAS = ("a balcony", "a lift", "a cellar", "a garage", "a dishwasher", "a garden")


@dataclass(frozen=True)
class Record:
    """A text with its fields' values and types."""

    kind: str
    text: str
    schema: dict[str, str]
    values: dict[str, Any]


def person(rng: random.Random) -> str:
    """A first and a last name."""
    return f"{rng.choice(FIRST)} {rng.choice(LAST)}"


def job(rng: random.Random) -> Record:
    """A vacancy."""
    title, firm, city = rng.choice(JOBS), rng.choice(FIRMS), rng.choice(CITIES)
    skills, hours = rng.sample(SKILLS, rng.randint(2, 3)), rng.randint(18, 40)
    salary, is_remote = 100 * rng.randint(220, 690), rng.random() < 0.5
    contact = person(rng) if rng.random() < 0.6 else None
    asked = f"Questions are answered by {contact}." if contact else "No telephone calls, please."
    where = "can be done from home" if is_remote else "has to be done on site"
    named = joined(skills, "and")
    text = (
        f"{firm} is growing, and its team in {city} is looking for a {title} for {hours} hours a "
        f"week. The work {where}. We ask for {named}; everything else can be learned "
        f"here. The yearly salary is {salary} euros. {asked}"
    )
    schema = {
        "job_title": "string",
        "company": "string",
        "city": "string",
        "hours_per_week": "integer",
        "yearly_salary_euros": "integer",
        "required_skills": "list of strings",
        "remote": "boolean",
        "contact_person": "string or null",
    }
    values = (title, firm, city, hours, salary, skills, is_remote, contact)
    return _record("vacancy", text, schema, values)


def order(rng: random.Random) -> Record:
    """A message about an order."""
    buyer, item, colour = person(rng), rng.choice(ITEMS), rng.choice(COLOURS)
    number, count = rng.randint(10000, 99999), rng.randint(1, 6)
    price, is_gift = rng.randint(12, 190) + rng.choice((0.5, 0.95, 0.25)), rng.random() < 0.5
    city, day = rng.choice(CITIES), rng.randint(1, 28)
    month = rng.choice(MONTHS)
    wrap = "Please wrap it as a gift." if is_gift else "It is not a gift, so no wrapping is needed."
    text = (
        f"Hello, my name is {buyer}. On {day} {month} I ordered your {item} in {colour}, order "
        f"number {number}. I need {count} of them, at {price:.2f} dollars each. Send everything to "
        f"my office in {city}. {wrap}"
    )
    schema = {
        "customer_name": "string",
        "order_number": "integer",
        "product": "string",
        "colour": "string",
        "quantity": "integer",
        "unit_price_dollars": "number",
        "delivery_city": "string",
        "gift_wrap": "boolean",
    }
    values = (buyer, number, item, colour, count, price, city, is_gift)
    return _record("order", text, schema, values)


def event(rng: random.Random) -> Record:
    """A notice of a talk."""
    speaker, talk, place = person(rng), rng.choice(TALKS), rng.choice(PLACES)
    day, month, hour = rng.randint(1, 28), rng.choice(MONTHS), rng.randint(14, 20)
    seats, fee = 5 * rng.randint(4, 40), rng.choice((0, 3, 5, 8, 12))
    topics = rng.sample(("history", "science", "food", "travel", "nature", "art"), 2)
    cost = f"Tickets cost {fee} euros at the door." if fee else "Entry costs nothing: 0 euros."
    named = joined(topics, "and")
    text = (
        f'"{talk}" is the title of a talk that {speaker} will give on {day} {month} at {hour}:00 '
        f"in {place}. It is about {named}. There are {seats} seats. {cost} Doors open "
        f"half an hour before."
    )
    schema = {
        "title": "string",
        "speaker": "string",
        "day": "integer",
        "month": "string",
        "starts_at": 'string such as "9:00"',
        "place": "string",
        "seats": "integer",
        "ticket_price_euros": "integer",
        "topics": "list of strings",
    }
    values = (talk, speaker, day, month, f"{hour}:00", place, seats, fee, topics)
    return _record("event", text, schema, values)


def flat(rng: random.Random) -> Record:
    """An advertisement for a flat."""
    city, floor, rooms = rng.choice(CITIES), rng.choice(FLOORS), rng.randint(1, 6)
    area, rent = rng.randint(24, 140), 5 * rng.randint(80, 380)
    extras, allows_pets = rng.sample(EXTRAS, 2), rng.random() < 0.5
    owner = person(rng)
    pets = "Pets are welcome." if allows_pets else "Pets are not allowed."
    named = joined(extras, "and")
    text = (
        f"To let from {owner}: a bright flat in {city}, on the {floor} floor, with {rooms} "
        f"{'room' if rooms == 1 else 'rooms'} and {area} square metres. It has {named}. "
        f"{pets} The monthly rent is {rent} euros, and a visit is possible any evening."
    )
    schema = {
        "city": "string",
        "floor": 'string such as "first"',
        "rooms": "integer",
        "area_square_metres": "integer",
        "monthly_rent_euros": "integer",
        "extras": "list of strings",
        "pets_allowed": "boolean",
        "landlord": "string",
    }
    values = (city, floor, rooms, area, rent, extras, allows_pets, owner)
    return _record("flat", text, schema, values)


KINDS: tuple[Callable[[random.Random], Record], ...] = (job, order, event, flat)


def _record(kind: str, text: str, schema: dict[str, str], values: tuple[Any, ...]) -> Record:
    return Record(kind, text, schema, dict(zip(schema, values, strict=True)))
