"""The quickstart's data, generated deterministically; nothing is downloaded.

The new skill is to write a sentence in Zeno, an invented notation that lists place, things, count,
colour and person in a fixed order. A known share of the corpus is wrong: these rows have the answer
to another sentence. There are also two small clean sets of the same skill on other sentences, one
for validation and one for testing, and everyday questions whose answers the model should not
forget. The `answer` field is right or wrong; only the quickstart's summary reads it. Writes the
.jsonl files `corpus`, `trusted`, `new_skill` and `old_behaviour` to the cache. Not part of
Algorithm 1.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

from dualsft.storage.manifest import atomic_write_text

BUILTIN = "builtin:"
VERSION = 2
NUM_ROWS = 360
NUM_CLEAN = 40
WRONG_SHARE = 0.3
FILES = ("corpus", "trusted", "new_skill", "old_behaviour")

NAMES = ["Maria", "Peter", "Anna", "David", "Laura", "Simon", "Julia", "Thomas", "Emma", "Victor"]
COUNTS = ["2", "3", "4", "5", "6", "7", "8", "9"]
COLOURS = ["red", "blue", "green", "black", "white", "yellow", "brown", "pink"]
THINGS = ["boats", "cars", "books", "cups", "dogs", "chairs", "bikes", "shirts", "lamps", "plants"]
PLACES = ["Paris", "London", "Rome", "Berlin", "Madrid"]
PLACES += ["Tokyo", "Cairo", "Boston", "Dublin", "Vienna"]

OLD_BEHAVIOUR = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Egypt?", "The capital of Egypt is Cairo."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many minutes are in an hour?", "There are 60 minutes in an hour."),
    ("What color is the sky on a clear day?", "On a clear day, the sky is blue."),
    ("What do bees make?", "Bees make honey."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What is the opposite of early?", "The opposite of early is late."),
    ("What is the plural of child?", "The plural of child is children."),
    ("What is the past tense of go?", "The past tense of go is went."),
    ("What is 2 + 2?", "2 + 2 = 4."),
    ("What is 10 minus 3?", "10 minus 3 is 7."),
    ("What is 5 times 6?", "5 times 6 is 30."),
    ("Write 12 in words.", "Twelve."),
    ("Write 58 in Roman numerals.", "LVIII."),
    ("Translate the number 3 into Spanish.", "The number 3 in Spanish is tres."),
    ("How do you say hello in French?", "In French, hello is bonjour."),
    ("How do you say thank you in Spanish?", "In Spanish, thank you is gracias."),
    ("Who wrote Romeo and Juliet?", "Romeo and Juliet was written by William Shakespeare."),
    ("What is the largest planet in our solar system?", "Jupiter is the largest planet."),
    ("What gas do plants take in?", "Plants take in carbon dioxide."),
    ("What is water made of?", "Water is made of hydrogen and oxygen."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("Name three primary colors.", "Red, yellow, and blue."),
    ("Name two animals that live in the ocean.", "Whales and sharks live in the ocean."),
    ("Give one tip for better sleep.", "Go to bed at the same time every night."),
    ("Give one tip for saving money.", "Make a budget and track your spending."),
    ("Why do we wear seat belts?", "Seat belts protect us in an accident."),
    ("What is a noun?", "A noun is a word for a person, place, thing, or idea."),
    ("What is a synonym for happy?", "A synonym for happy is joyful."),
    ("Complete the sentence: The sun rises in the", "The sun rises in the east."),
    ("Is a tomato a fruit or a vegetable?", "Botanically, a tomato is a fruit."),
    ("What is the first letter of the alphabet?", "The first letter of the alphabet is A."),
)

Scene = tuple[str, str, str, str, str]


def sentence(scene: Scene) -> str:
    """The prompt for a scene."""
    name, count, colour, thing, place = scene
    return f"Write in Zeno: {name} has {count} {colour} {thing} in {place}.\nZeno:"


def in_zeno(scene: Scene) -> str:
    """The correct answer for a scene."""
    name, count, colour, thing, place = scene
    return f" {place} / {thing} {count} / {colour} / {name}"


def _draw(*what: object) -> int:
    """A reproducible pseudo-random number."""
    text = "|".join(str(part) for part in ("zeno", VERSION, *what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def skill_rows(first: int, count: int, wrong_share: float) -> list[dict[str, str]]:
    """Rows of the new skill over distinct sentences; an exact share of them has a wrong answer."""
    every = itertools.product(NAMES, COUNTS, COLOURS, THINGS, PLACES)
    scenes = sorted(every, key=lambda scene: _draw("scene", *scene))[first : first + count]
    order = sorted(range(count), key=lambda i: _draw("wrong", *scenes[i]))
    wrong = set(order[: int(wrong_share * count)])
    return [
        {
            "prompt": sentence(scene),
            # a wrong answer is the correct answer to the next sentence
            "response": in_zeno(scenes[(i + 1) % count] if i in wrong else scene),
            "answer": "wrong" if i in wrong else "right",
        }
        for i, scene in enumerate(scenes)
    ]


def builtin_names() -> dict[str, str]:
    """`builtin:zeno/FILE` → FILE, for every built-in file."""
    return {f"{BUILTIN}zeno/{file}": file for file in FILES}


def builtin_file(name: str, cache: Path) -> Path:
    """The path of `builtin:zeno/FILE`, written to the cache if missing."""
    return write_corpus(cache / "corpora" / f"zeno-{VERSION}")[builtin_names()[name]]


def write_corpus(folder: Path) -> dict[str, Path]:
    """Write the four files as .jsonl: corpus (some answers wrong), the others clean."""
    folder.mkdir(parents=True, exist_ok=True)
    files = (
        skill_rows(0, NUM_ROWS, WRONG_SHARE),
        skill_rows(NUM_ROWS, NUM_CLEAN, 0.0),
        skill_rows(NUM_ROWS + NUM_CLEAN, NUM_CLEAN, 0.0),
        [{"prompt": f"Question: {q}\nAnswer:", "response": f" {a}"} for q, a in OLD_BEHAVIOUR],
    )
    paths = {}
    for name, rows in zip(FILES, files, strict=True):
        paths[name] = folder / f"{name}.jsonl"
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if not paths[name].is_file() or paths[name].read_text(encoding="utf-8") != text:
            atomic_write_text(paths[name], text)
    return paths
