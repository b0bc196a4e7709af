"""Math problems about probability, counting and sequences.

`numbers` are drawn, `derive` computes further ones, and a draw counts only if every value of `answer` is clean
(positive, and whole unless `clean` says otherwise) and `where` holds.
"""

from typing import Any

TEMPLATES: list[dict[str, Any]] = [
    {
        "name": "probability-marble-bag",
        "texts": [
            "A bag contains {r} red, {g} green and {b_n} blue {x}. {a} takes one out without looking. What is "
            "the probability that it is not blue?",
            "There are {r} red, {g} green and {b_n} blue {x} in a bag. If one is drawn at random, how likely is"
            " it to be red or green? Give the answer as a fraction in lowest terms.",
        ],
        "slots": {"x": ["marbles", "beads", "buttons", "counters"]},
        "numbers": {"r": range(2, 10), "g": range(2, 10), "b_n": range(3, 10)},
        "answer": lambda v: (v.r + v.g) / (v.r + v.g + v.b_n),
        "clean": "fraction",
    },
    {
        "name": "probability-two-dice",
        "texts": [
            "Two fair six-sided dice are rolled. In how many of the 36 outcomes is the sum {s}, and what is the"
            " probability of this?",
            "{a} rolls two ordinary dice and adds the numbers. List all the ways to get a sum of {s} and give "
            "the probability.",
        ],
        "numbers": {"s": range(3, 12)},
        "answer": lambda v: (6 - abs(7 - v.s)) / 36,
        "clean": "fraction",
    },
    {
        "name": "probability-outfits",
        "texts": [
            "{a} packs {n} shirts, {m} pairs of trousers and {k} pairs of shoes. How many different outfits can"
            " {a.he} put together? How many of them use {a.his} favourite shirt?",
            "A café offers {n} kinds of sandwich, {m} soups and {k} drinks. A lunch menu is one of each. How "
            "many different menus are possible?",
        ],
        "numbers": {"n": range(3, 9), "m": range(2, 6), "k": range(2, 5)},
        "answer": lambda v: v.n * v.m * v.k,
    },
    {
        "name": "probability-handshakes",
        "texts": [
            "At a meeting each of the {n} people shakes hands once with everyone else. How many handshakes are there?",
            "{n} teams play in a tournament, and each team meets every other team exactly once. How many games "
            "are played?",
        ],
        "numbers": {"n": range(5, 17)},
        "answer": lambda v: v.n * (v.n - 1) / 2,
    },
    {
        "name": "probability-lucky-ticket",
        "heldout": True,
        "texts": [
            "In a raffle of {n} tickets there are {big} main prizes and {small} small prizes. {a} buys one "
            "ticket. What is the probability that {a.he} wins something? How many tickets win nothing?",
            "A raffle has {n} tickets, {big} of them for main prizes and {small} for small prizes. What is the "
            "chance that a single ticket wins a prize? Simplify the fraction.",
        ],
        "numbers": {"n": range(60, 241, 20), "big": range(2, 6), "small": range(10, 31, 5)},
        "answer": lambda v: (v.big + v.small) / v.n,
        "clean": "fraction",
    },
    {
        "name": "sequence-theatre-rows",
        "texts": [
            "The first row of a theatre has {first} seats, and every row behind it has {step} seats more than "
            "the row in front. How many seats are there in {rows} rows?",
            "A stadium block starts with {first} seats in row 1 and each further row has {step} more. How many "
            "seats does row {rows} have, and how many are there in all {rows} rows?",
        ],
        "numbers": {"first": range(10, 31), "step": [2, 3, 4], "rows": range(8, 21)},
        "answer": lambda v: v.rows * (2 * v.first + (v.rows - 1) * v.step) / 2,
    },
    {
        "name": "sequence-next-term",
        "texts": [
            "Find the next two numbers of the sequence {s1}, {s2}, {s3}, {s4}, ... and explain the rule.",
            "Here is a number pattern: {s1}, {s2}, {s3}, {s4}. What rule does it follow, and which number comes"
            " in sixth place?",
        ],
        "numbers": {"s1": range(1, 10), "k": [2, 3], "add": range(1, 6)},
        "derive": lambda v: {
            "s2": v.k * v.s1 + v.add,
            "s3": v.k * (v.k * v.s1 + v.add) + v.add,
            "s4": v.k * (v.k * (v.k * v.s1 + v.add) + v.add) + v.add,
        },
        "answer": lambda v: v.k * v.s4 + v.add,
    },
    {
        "name": "sequence-bacteria",
        "texts": [
            "A colony of {start} bacteria doubles every {gap} minutes. How many bacteria are there after "
            "{hours} hours?",
            "A culture starts with {start} bacteria, and their number doubles every {gap} minutes. How many are"
            " there {hours} hours later?",
        ],
        "numbers": {"start": [20, 50, 80, 100, 150], "gap": [20, 30, 40, 60], "hours": [2, 3, 4]},
        "where": lambda v: 60 * v.hours % v.gap == 0,
        "answer": lambda v: v.start * 2 ** int(60 * v.hours / v.gap),
    },
    {
        "name": "sequence-matchsticks",
        "heldout": True,
        "texts": [
            "{a} lays a row of squares with matchsticks. One square takes 4 matchsticks, two squares in a row "
            "take 7, three take 10, and so on. How many matchsticks are needed for {n} squares?",
            "A fence is drawn with lines: 1 field needs 4 lines, 2 fields need 7 and 3 fields need 10. Find a "
            "formula and use it to work out the number of lines for {n} fields.",
        ],
        "numbers": {"n": range(12, 61)},
        "answer": lambda v: 3 * v.n + 1,
    },
]
