"""Math problems about sharing, recipes, ages and averages.

`numbers` are drawn, `derive` computes further ones, and a draw counts only if every value of `answer` is clean
(positive, and whole unless `clean` says otherwise) and `where` holds.
"""

from typing import Any

TEMPLATES: list[dict[str, Any]] = [
    {
        "name": "sharing-marbles",
        "texts": [
            "{a}, {b} and {c} share {total} {x}. {b} gets twice as many as {a}, and {c} gets {more} more than "
            "{a}. How many {x} does each of them get?",
            "There are {total} {x} to be divided among three children. {b} should have twice as many as {a}, "
            "and {c} should have {more} more than {a}. How many does {b} get?",
        ],
        "slots": {"x": ["marbles", "stickers", "trading cards", "seashells", "chocolates"]},
        "numbers": {"first": range(6, 25), "more": range(4, 17)},
        "derive": lambda v: {"total": 4 * v.first + v.more},
        "answer": lambda v: (v.total - v.more) / 4,
    },
    {
        "name": "sharing-party-bags",
        "texts": [
            "For a birthday party {a} has {x} balloons, {y} bouncy balls and {z} lollipops. {a.He} wants to "
            "fill as many equal party bags as possible with nothing left over. How many bags can {a.he} make, "
            "and what goes into each?",
            "{a} is packing identical party bags from {x} balloons, {y} bouncy balls and {z} lollipops and "
            "wants to use everything up. What is the largest possible number of bags?",
        ],
        "numbers": {"bags": range(6, 13), "i": [2, 4], "j": [3, 5], "k": [1, 7]},
        "derive": lambda v: {"x": v.bags * v.i, "y": v.bags * v.j, "z": v.bags * v.k},
        "answer": lambda v: v.bags,
    },
    {
        "name": "sharing-rent",
        "texts": [
            "{a}, {b} and {c} rent a flat for ${rent} a month. {a} has the biggest room and pays half of the "
            "rent; the other two split the rest equally. How much does each person pay over {months} months?",
            "The rent of a flat is ${rent} per month. {a} pays half of it and {b} and {c} divide the remaining "
            "half equally. How much does {b} pay in {months} months?",
        ],
        "numbers": {"rent": range(900, 2101, 60), "months": [3, 4, 6, 12]},
        "answer": lambda v: (v.rent / 2 * v.months, v.rent / 4 * v.months),
    },
    {
        "name": "sharing-ratio-prize",
        "texts": [
            "{a} and {b} win ${prize} and split it in the ratio {i}:{j}. How much more does {b} receive than {a}?",
            "A prize of ${prize} is divided between {a} and {b} in the ratio {i} to {j}. How many dollars does "
            "each of them get?",
        ],
        "numbers": {"i": [1, 2, 3], "j": [5, 7, 8], "part": range(12, 90, 3)},
        "derive": lambda v: {"prize": (v.i + v.j) * v.part},
        "where": lambda v: (v.i, v.j) != (2, 8),
        "answer": lambda v: (v.j - v.i) * v.part,
    },
    {
        "name": "sharing-library-shelves",
        "heldout": True,
        "texts": [
            "A library received {total} new books. It keeps {kept} at the desk and spreads the rest evenly over"
            " {shelves} shelves. Later {b} borrows {gone} books from one of these shelves. How many books "
            "remain on that shelf?",
            "Out of {total} donated books, a school library sets {kept} aside and puts the others on {shelves} "
            "shelves, the same number on each. {a} takes {gone} books from the top shelf. How many are left on "
            "it?",
        ],
        "numbers": {"shelves": range(6, 13), "each": range(14, 31), "kept": range(8, 25), "gone": range(3, 9)},
        "derive": lambda v: {"total": v.kept + v.shelves * v.each},
        "answer": lambda v: v.each - v.gone,
    },
    {
        "name": "recipe-scaling",
        "texts": [
            "A {dish} recipe for {serves} people needs {flour} grams of flour and {eggs} eggs. {a} is cooking "
            "for {guests} people. How much flour and how many eggs does {a.he} need?",
            "{a} has a {dish} recipe that serves {serves}: {flour} g of flour, {eggs} eggs. Work out the "
            "amounts for {guests} guests.",
        ],
        "slots": {"dish": ["pancake", "waffle", "crepe", "muffin", "fresh pasta"]},
        "numbers": {"serves": [2, 4, 6], "flour": range(120, 361, 30), "eggs": [2, 3, 4], "guests": range(9, 25, 3)},
        "answer": lambda v: (v.flour * v.guests / v.serves, v.eggs * v.guests / v.serves),
    },
    {
        "name": "recipe-cookies-left",
        "texts": [
            "{a} bakes {trays} trays of cookies with {per} cookies on each. {a.His} family eats {eaten} of "
            "them, and the rest go into boxes of {box}. How many boxes does {a.he} fill?",
            "From the oven come {trays} trays with {per} cookies each. {a} and {a.his} friends eat {eaten} "
            "cookies straight away. How many boxes of {box} can be filled with the others?",
        ],
        "numbers": {"trays": range(3, 9), "per": [12, 15, 16, 18, 20], "eaten": range(5, 21), "box": [4, 5, 6, 8]},
        "answer": lambda v: (v.trays * v.per - v.eaten) / v.box,
    },
    {
        "name": "recipe-lemonade",
        "texts": [
            "To make lemonade, {a} mixes {lemon} parts lemon juice with {water} parts water. {a.He} wants "
            "{total} millilitres of lemonade in total. How many millilitres of lemon juice are needed?",
            "A drink is made of lemon juice and water in the ratio {lemon}:{water}. How much water goes into "
            "{total} ml of the drink?",
        ],
        "numbers": {"lemon": [2, 3], "water": [5, 7], "part": range(60, 301, 20)},
        "derive": lambda v: {"total": (v.lemon + v.water) * v.part},
        "answer": lambda v: v.lemon * v.part,
    },
    {
        "name": "recipe-bread-oven",
        "texts": [
            "A bakery uses {grams} grams of flour for one loaf. It starts the day with {bags} bags of flour of "
            "{kilos} kg each and bakes {loaves} loaves. How many kilograms of flour are left?",
            "One loaf takes {grams} g of flour. A baker has {bags} sacks with {kilos} kg of flour in each and "
            "makes {loaves} loaves. How much flour, in kilograms, is still there?",
        ],
        "numbers": {"grams": [400, 450, 500, 600], "bags": [2, 3, 4], "kilos": [20, 25], "loaves": range(40, 91, 10)},
        "answer": lambda v: v.bags * v.kilos - v.grams * v.loaves / 1000,
    },
    {
        "name": "recipe-soup-pots",
        "heldout": True,
        "texts": [
            "A canteen cooks soup in pots of {pot} litres. One bowl holds {ml} ml, and {guests} guests eat "
            "{each} bowls each. How many pots does the canteen have to cook?",
            "{guests} people come to a village fair, and each of them eats {each} bowls of stew. A bowl is {ml}"
            " ml and a pot holds {pot} litres. How many full pots are needed?",
        ],
        "numbers": {"pot": [10, 12, 15, 20], "ml": [250, 300, 400], "guests": range(40, 161, 20), "each": [2, 3]},
        "answer": lambda v: v.ml * v.guests * v.each / 1000 / v.pot,
    },
    {
        "name": "age-mother-child",
        "texts": [
            "{a} is {child} years old and {a.his} mother is {mother}. In how many years will the mother be "
            "exactly twice as old as {a}?",
            "{a}'s mother is {mother} and {a} is {child}. How many years from now will {a} be half as old as "
            "{a.his} mother?",
        ],
        "numbers": {"child": range(5, 14), "years": range(6, 20)},
        "derive": lambda v: {"mother": 2 * (v.child + v.years) - v.years},
        "where": lambda v: 24 <= v.mother - v.child <= 40,
        "answer": lambda v: v.mother - 2 * v.child,
    },
    {
        "name": "age-siblings-sum",
        "texts": [
            "{a} is {gap} years older than {b}. The sum of their ages is {total}. How old is each of them?",
            "The ages of {a} and {b} add up to {total}, and {a} is older by {gap} years. How old will {b} be in"
            " {later} years?",
        ],
        "numbers": {"b_age": range(7, 25), "gap": range(2, 9), "later": range(3, 12)},
        "derive": lambda v: {"total": 2 * v.b_age + v.gap},
        "answer": lambda v: (v.total - v.gap) / 2,
    },
    {
        "name": "age-grandfather",
        "texts": [
            "{a}'s grandfather is {k} times as old as {a}. {past} years ago he was {old} years old. How old is "
            "{a} now?",
            "{past} years ago {a}'s grandfather was {old}. Today he is exactly {k} times as old as {a}. What is"
            " {a}'s age?",
        ],
        "numbers": {"k": [5, 6, 7, 8], "age": range(8, 16), "past": range(4, 13)},
        "derive": lambda v: {"old": v.k * v.age - v.past},
        "where": lambda v: 55 <= v.k * v.age <= 92,
        "answer": lambda v: (v.old + v.past) / v.k,
    },
    {
        "name": "age-three-friends",
        "texts": [
            "{a} is twice as old as {b}, and {c} is {gap} years younger than {a}. Together they are {total} "
            "years old. How old is {c}?",
            "The ages of {a}, {b} and {c} add up to {total}. {a} is twice as old as {b}, and {c} is {gap} years"
            " younger than {a}. Find all three ages.",
        ],
        "numbers": {"b_age": range(7, 20), "gap": range(2, 7)},
        "derive": lambda v: {"total": 5 * v.b_age - v.gap},
        "answer": lambda v: (2 * v.b_age - v.gap, v.b_age),
    },
    {
        "name": "age-oak-tree",
        "heldout": True,
        "texts": [
            "The oak in the park is {gap} years older than the linden tree beside it. In {later} years the oak "
            "will be exactly twice as old as the linden tree. How old are the two trees today?",
            "A castle tower is {gap} years older than the bridge in front of it. {later} years from now the "
            "tower will be twice as old as the bridge. How old is the bridge today?",
        ],
        "numbers": {"linden": range(20, 61), "later": range(5, 31, 5)},
        "derive": lambda v: {"gap": v.linden + v.later},
        "answer": lambda v: (v.gap - v.later, 2 * v.gap - v.later),
    },
    {
        "name": "average-missing-score",
        "texts": [
            "{a} scored {x}, {y} and {z} on the first three tests. What must {a.he} score on the fourth test to"
            " have an average of {mean}?",
            "After three tests {a} has {x}, {y} and {z} points. {a.He} wants an average of {mean} after four "
            "tests. How many points does the last test need?",
        ],
        "numbers": {"x": range(62, 95), "y": range(62, 95), "z": range(62, 95), "mean": range(75, 91)},
        "where": lambda v: 60 <= 4 * v.mean - v.x - v.y - v.z <= 100,
        "answer": lambda v: 4 * v.mean - v.x - v.y - v.z,
    },
    {
        "name": "average-temperature",
        "texts": [
            "The noon temperatures of five days in {city} were {t1}, {t2}, {t3}, {t4} and {t5} degrees Celsius."
            " What was the average, and what is the difference between the warmest and the coldest day?",
            "At noon it was {t1}, {t2}, {t3}, {t4} and {t5} degrees Celsius in {city} on five days in a row. "
            "Calculate the mean temperature. On how many days was it warmer than that?",
        ],
        "slots": {"city": ["Oslo", "Lisbon", "Nagoya", "Bogota", "Tunis", "Krakow"]},
        "numbers": {f"t{i}": range(11, 27) for i in range(1, 6)},
        "answer": lambda v: (v.t1 + v.t2 + v.t3 + v.t4 + v.t5) / 5,
    },
    {
        "name": "average-new-member",
        "texts": [
            "The average age of the {n} members of a {club} is {mean}. A new member joins and the average "
            "becomes {new}. How old is the new member?",
            "{n} people in a {club} are {mean} years old on average. After {a} joins, the average age is {new}."
            " What is {a}'s age?",
        ],
        "slots": {"club": ["chess club", "choir", "book club", "rowing team", "film club"]},
        "numbers": {"n": range(5, 13), "mean": range(20, 41), "rise": [1, 2]},
        "derive": lambda v: {"new": v.mean + v.rise},
        "answer": lambda v: v.new * (v.n + 1) - v.mean * v.n,
    },
    {
        "name": "average-weekly-steps",
        "heldout": True,
        "texts": [
            "{a} walked an average of {mean} steps a day from Monday to Friday and {weekend} steps on each day "
            "of the weekend. What is {a.his} daily average for the whole week?",
            "From Monday to Friday {a}'s step counter shows {mean} steps a day on average, on Saturday and "
            "Sunday {weekend} each. What is the average over all seven days?",
        ],
        "numbers": {"mean": range(6000, 9001, 500), "weekend": range(9500, 13001, 500)},
        "answer": lambda v: (5 * v.mean + 2 * v.weekend) / 7,
    },
]
