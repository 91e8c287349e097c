"""The quickstart's own data, generated deterministically: nothing is downloaded.

A new skill no model has seen: writing numbers in Velo, an invented language with one word a digit,
read from the right. A known share of the corpus is wrong: it carries the answer to another number.
Beside it, a clean test set of the same skill on other numbers, and a set of everyday questions whose
answers the model should not forget. The `answer` field says right or wrong; nothing but the
quickstart's own summary ever reads it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from dualsft.errors import ConfigError
from dualsft.rundir import atomic_write_text

BUILTIN = "builtin:"
VERSION = 1
WORDS = ("zu", "mi", "tan", "sek", "ro", "vel", "pok", "lim", "dar", "no")
PHRASES = (
    "Write {n} in Velo.",
    "How do you say {n} in Velo?",
    "Translate the number {n} into Velo.",
    "What is {n} in Velo?",
)
NUM_ROWS = 600
NUM_TEST = 64
WRONG_SHARE = 0.3
PROMPT = "Write 5072 in Velo."

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
    ("Write 407 in words.", "Four hundred and seven."),
    ("Write 58 in Roman numerals.", "LVIII."),
    ("Translate the number 3 into Spanish.", "The number 3 in Spanish is tres."),
    ("Translate the number 10 into French.", "The number 10 in French is dix."),
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
    ("Say hello politely.", "Hello! How can I help you today?"),
    ("Write a short greeting for a birthday card.", "Happy birthday! Have a wonderful day."),
    ("What is the first letter of the alphabet?", "The first letter of the alphabet is A."),
)


def in_velo(number: int) -> str:
    """The digits of a number as words, last digit first."""
    return " ".join(WORDS[int(digit)] for digit in reversed(str(number)))


def _draw(seed: int, *what: object) -> int:
    """A repeatable large number for (seed, what)."""
    text = "|".join(str(part) for part in ("velo", seed, *what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def skill_rows(
    num_rows: int, seed: int, wrong_share: float, start: int = 0
) -> list[dict[str, str]]:
    """Rows of the new skill over distinct numbers; an exact share of them has a wrong answer."""
    numbers = sorted(range(1000, 10000), key=lambda n: _draw(0, "number", n))
    numbers = numbers[start : start + num_rows]
    wrong = set(
        sorted(numbers, key=lambda n: _draw(seed, "wrong", n))[: int(wrong_share * num_rows)]
    )
    rows = []
    for n in numbers:
        answer = n if n not in wrong else 1000 + _draw(seed, "other", n) % 9000
        if answer == n and n in wrong:
            answer = n + 1
        rows.append(
            {
                "prompt": PHRASES[_draw(seed, "phrase", n) % len(PHRASES)].format(n=n),
                "response": in_velo(answer),
                "answer": "wrong" if n in wrong else "right",
            }
        )
    return rows


def builtin_file(name: str, cache: Path) -> Path:
    """The path of `builtin:velo/FILE`, written into the cache when it is not there."""
    files = {f"{BUILTIN}velo/{file}": file for file in ("corpus", "new_skill", "old_behaviour")}
    if name not in files:
        raise ConfigError(f"{name!r} is no built-in file; there are: {', '.join(files)}")
    return write_corpus(cache / "corpora" / f"velo-{VERSION}")[files[name]]


def write_corpus(folder: Path, seed: int = 0) -> dict[str, Path]:
    """corpus.jsonl (some answers wrong), new_skill.jsonl (clean), old_behaviour.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    old = [{"prompt": prompt, "response": response} for prompt, response in OLD_BEHAVIOUR]
    files = {
        "corpus": skill_rows(NUM_ROWS, seed, WRONG_SHARE),
        "new_skill": skill_rows(NUM_TEST, seed, 0.0, start=NUM_ROWS),
        "old_behaviour": old,
    }
    paths = {}
    for name, rows in files.items():
        paths[name] = folder / f"{name}.jsonl"
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if not paths[name].is_file() or paths[name].read_text(encoding="utf-8") != text:
            atomic_write_text(paths[name], text)
    return paths
