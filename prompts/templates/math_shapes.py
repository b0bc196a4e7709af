"""Math problems about area, units and number puzzles.

`numbers` are drawn, `derive` computes further ones, and a draw counts only if every value of `answer` is clean
(positive, and whole unless `clean` says otherwise) and `where` holds.
"""

from typing import Any

from templates.words import nouns

TEMPLATES: list[dict[str, Any]] = [
    {
        "name": "area-carpet",
        "texts": [
            "A room is {l} m long and {w} m wide. {a} covers the floor with carpet at ${p} per square metre and"
            " leaves out a square of {s} m by {s} m for a stove. What does the carpet cost?",
            "{a} lays carpet in a room of {l} m by {w} m, except for a {s} m by {s} m corner where the stove "
            "stands. A square metre costs ${p}. How much does {a.he} pay for the carpet?",
        ],
        "numbers": {"l": range(5, 11), "w": range(3, 7), "p": range(9, 31, 3), "s": [1, 2]},
        "answer": lambda v: (v.l * v.w - v.s * v.s) * v.p,
    },
    {
        "name": "area-fence",
        "texts": [
            "A rectangular {x} is {l} metres long and {w} metres wide. A fence is built around it with a gate "
            "of {gate} metres that needs no fence. At ${p} per metre, how much does the fence cost?",
            "{a} wants to fence {a.his} {l} m by {w} m {x}, leaving a {gate} m gap for the gate. Fencing costs "
            "${p} a metre. What will {a.he} pay?",
        ],
        "slots": {"x": ["vegetable garden", "meadow", "playground", "chicken run", "orchard"]},
        "numbers": {"l": range(14, 41), "w": range(8, 25), "gate": [2, 3, 4], "p": range(6, 19)},
        "where": lambda v: v.l > v.w,
        "answer": lambda v: (2 * (v.l + v.w) - v.gate) * v.p,
    },
    {
        "name": "area-path-around-pool",
        "texts": [
            "A swimming pool measures {l} m by {w} m. A stone path {d} m wide runs all the way around it. What "
            "is the area of the path?",
            "Around a flower bed of {l} m by {w} m runs a gravel path that is {d} m wide on every side. How many "
            "square metres of gravel path are there?",
        ],
        "numbers": {"l": range(10, 26), "w": range(5, 13), "d": [1, 2, 3]},
        "where": lambda v: v.l > v.w,
        "answer": lambda v: (v.l + 2 * v.d) * (v.w + 2 * v.d) - v.l * v.w,
    },
    {
        "name": "area-triangle-sail",
        "texts": [
            "A triangular sail has a base of {b_m} m and a height of {h} m. The cloth comes in rolls that cover"
            " {roll} square metres. How many rolls are needed for {n} such sails?",
            "{a} sews {n} triangular flags, each with a base of {b_m} dm and a height of {h} dm. One piece of "
            "cloth gives {roll} square decimetres. How many pieces of cloth does {a.he} use?",
        ],
        "numbers": {"b_m": range(4, 11), "h": range(6, 15), "roll": [6, 8, 10, 12], "n": range(2, 7)},
        "answer": lambda v: v.b_m * v.h * v.n / 2 / v.roll,
    },
    {
        "name": "area-box-volume",
        "texts": [
            "A box is {l} cm long, {w} cm wide and {h} cm high. How many cubes with an edge of {e} cm fit into "
            "it exactly?",
            "{a} packs wooden cubes with an edge of {e} cm into a box of {l} cm x {w} cm x {h} cm. How many "
            "cubes fill the box?",
        ],
        "numbers": {"i": range(3, 9), "j": range(2, 7), "k": range(2, 6), "e": [2, 3, 4, 5]},
        "derive": lambda v: {"l": v.i * v.e, "w": v.j * v.e, "h": v.k * v.e},
        "answer": lambda v: v.i * v.j * v.k,
    },
    {
        "name": "area-wall-paint",
        "heldout": True,
        "texts": [
            "A wall is {l} m long and {h} m high and has {n} windows of {win} square metres each. One litre of "
            "paint covers {cover} square metres. How many litres does {a} need for two coats?",
            "{a} paints a wall of {l} m by {h} m twice. {n} windows of {win} m² each are left out, and a litre of "
            "paint is enough for {cover} m². How much paint does {a.he} need?",
        ],
        "numbers": {"l": range(6, 13), "h": [3, 4], "n": [2, 3], "win": [2, 3], "cover": [4, 5, 6, 8]},
        "answer": lambda v: (v.l * v.h - v.n * v.win) * 2 / v.cover,
    },
    {
        "name": "units-water-bottles",
        "texts": [
            "{a} drinks {glasses} glasses of {ml} ml of water a day. How many litres is that in {days} days?",
            "A class of {glasses} children drinks {ml} ml of juice per child every day. How many litres does "
            "the class drink in {days} days?",
        ],
        "numbers": {"glasses": range(5, 13), "ml": [200, 250, 300], "days": [5, 7, 10, 14]},
        "answer": lambda v: v.glasses * v.ml * v.days / 1000,
        "clean": "tenths",
    },
    {
        "name": "units-ribbon",
        "texts": [
            "A roll holds {m} metres of ribbon. {a} cuts pieces of {cm} cm for wrapping presents. How many "
            "pieces does {a.he} get, and how many centimetres are left over?",
            "{a} cuts a rope of {m} metres into pieces of {cm} cm. How many whole pieces are there, and how long "
            "is the rest?",
        ],
        "numbers": {"m": range(4, 13), "cm": [35, 45, 55, 65, 70, 75]},
        "answer": lambda v: v.m * 100 % v.cm,
    },
    {
        "name": "units-speed",
        "texts": [
            "A {x} moves at {ms} metres per second. What is that in kilometres per hour, and how far does it "
            "get in {minutes} minutes?",
            "How many kilometres per hour are {ms} metres per second? A {x} travels at this speed for {minutes}"
            " minutes. What distance does it cover?",
        ],
        "slots": {"x": ["cyclist", "tram", "motorboat", "racing horse", "drone"]},
        "numbers": {"ms": [5, 10, 15, 20, 25], "minutes": [4, 6, 10, 12, 15]},
        "answer": lambda v: v.ms * 18 / 5,
    },
    {
        "name": "units-currency",
        "heldout": True,
        "texts": [
            "{a} changes {amount} dollars into {cur} at a rate of {rate} {cur} per dollar. The bank keeps a fee"
            " of {fee} {cur}. How many {cur} does {a.he} receive?",
            "One dollar is worth {rate} {cur}. {a} exchanges {amount} dollars and pays a fee of {fee} {cur}. "
            "What does {a.he} get?",
        ],
        "cases": [
            {"cur": "zloty", "rate": 4},
            {"cur": "kroner", "rate": 7},
            {"cur": "kroner", "rate": 10},
            {"cur": "pesos", "rate": 18},
            {"cur": "rand", "rate": 19},
        ],
        "numbers": {"amount": range(120, 401, 20), "fee": [10, 15, 25]},
        "answer": lambda v: v.amount * v.rate - v.fee,
    },
    {
        "name": "puzzle-think-of-number",
        "texts": [
            "I think of a number, multiply it by {k}, add {p} and get {r}. What is my number?",
            "{a} thinks of a number. {a.He} multiplies it by {k}, then adds {p}, and the result is {r}. Which "
            "number was it?",
        ],
        "numbers": {"n": range(6, 40), "k": range(3, 10), "p": range(5, 30)},
        "derive": lambda v: {"r": v.k * v.n + v.p},
        "answer": lambda v: (v.r - v.p) / v.k,
    },
    {
        "name": "puzzle-heads-and-legs",
        "texts": [
            "On a farm there are {x} and {y}. {a} counts {heads} heads and {legs} legs. How many {y} are there?",
            "A farmer keeps only {x} and {y}. Together the animals have {heads} heads and {legs} legs. How many"
            " of each kind are there?",
        ],
        "cases": [
            {"x": "hens", "y": "goats"},
            {"x": "ducks", "y": "cows"},
            {"x": "geese", "y": "sheep"},
            {"x": "turkeys", "y": "pigs"},
        ],
        "numbers": {"two": range(5, 25), "four": range(4, 20)},
        "derive": lambda v: {"heads": v.two + v.four, "legs": 2 * v.two + 4 * v.four},
        "answer": lambda v: v.four,
    },
    {
        "name": "puzzle-consecutive",
        "texts": [
            "The sum of three consecutive {kind} numbers is {s}. What are the numbers?",
            "Three {kind} numbers in a row add up to {s}. Find the largest of them.",
        ],
        "cases": [{"kind": "even"}, {"kind": "odd"}],
        "numbers": {"m": range(12, 60)},
        "derive": lambda v: {"s": 3 * (2 * v.m + (1 if v.kind == "odd" else 0))},
        "answer": lambda v: v.s / 3,
    },
    {
        "name": "puzzle-coins",
        "texts": [
            "{a} has {total} coins in {a.his} pocket, all of them dimes and quarters. They are worth {worth} "
            "cents. How many quarters does {a.he} have?",
            "In {a}'s money box there are {total} coins, only dimes and quarters, with a total value of {worth}"
            " cents. How many dimes and how many quarters are there?",
        ],
        "numbers": {"dimes": range(3, 15), "quarters": range(2, 12)},
        "derive": lambda v: {"total": v.dimes + v.quarters, "worth": 10 * v.dimes + 25 * v.quarters},
        "answer": lambda v: v.quarters,
    },
    {
        "name": "puzzle-two-numbers",
        "heldout": True,
        "texts": [
            "The sum of two numbers is {s} and their difference is {d}. What are the two numbers, and what is "
            "their product?",
            "Two numbers add up to {s}. The larger one is {d} more than the smaller one. Find both numbers and "
            "multiply them.",
        ],
        "numbers": {"x": range(20, 60), "y": range(5, 20)},
        "derive": lambda v: {"s": v.x + v.y, "d": v.x - v.y},
        "answer": lambda v: v.x * v.y,
    },
    {
        "name": "puzzle-shelf-items",
        "texts": [
            "A shop has {n} {x} in the morning. It sells {part} of them before lunch and {sold} more in the "
            "afternoon. How many {x} are left in the evening?",
            "There were {n} {x} on the shelf. Before noon {part} of them went, and another {sold} were bought "
            "later in the day. How many remain?",
        ],
        "slots": {"x": nouns("umbrella, scarf/scarves, toy car, mug, football")},
        "cases": [
            {"part": "a third", "den": 3},
            {"part": "a quarter", "den": 4},
            {"part": "half", "den": 2},
            {"part": "one sixth", "den": 6},
        ],
        "numbers": {"n": range(60, 241, 12), "sold": range(5, 20)},
        "answer": lambda v: v.n - v.n / int(v.den) - v.sold,
    },
]
