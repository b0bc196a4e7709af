"""Math problems about shopping, savings and percentages.

`numbers` are drawn, `derive` computes further ones, and a draw counts only if every value of `answer` is clean
(positive, and whole unless `clean` says otherwise) and `where` holds.
"""

from decimal import Decimal
from typing import Any

from templates.words import nouns

TEMPLATES: list[dict[str, Any]] = [
    {
        "name": "shopping-stationery",
        "texts": [
            "{a} buys {n} {x} at ${p} each and {m} {y} at ${q} each. {a.He} pays with a ${note} bill. How much "
            "change does {a.he} get?",
            "At the stationery shop, {x} cost ${p} apiece and {y} cost ${q} apiece. {a} takes {n} {x} and {m} "
            "{y} and hands over ${note}. What is {a.his} change?",
        ],
        "slots": {"x": nouns("pencil, eraser, glue stick, pen"), "y": nouns("notebook, folder, ruler, marker")},
        "numbers": {
            "n": range(2, 7),
            "m": range(2, 6),
            "p": [Decimal("0.75"), Decimal("1.25"), Decimal("1.50"), 2],
            "note": [20, 50],
            "q": [Decimal("2.25"), Decimal("2.50"), 3, Decimal("3.50"), 4],
        },
        "answer": lambda v: v.note - v.n * v.p - v.m * v.q,
        "clean": "cents",
    },
    {
        "name": "shopping-market-stall",
        "texts": [
            "A market stall sells {x} for ${p} a kilo. On Saturday {a} sold {n} kilos, and on Sunday {more} "
            "kilos more than on Saturday. How much money did the stall take in over the weekend?",
            "{a} sells {x} at ${p} per kilogram. {a.He} sold {n} kg on Saturday and {more} kg more than that on"
            " Sunday. How many dollars did {a.he} earn in the two days?",
        ],
        "slots": {"x": ["tomatoes", "peaches", "mushrooms", "cherries", "onions", "green beans"]},
        "numbers": {"p": range(2, 9), "n": range(14, 60), "more": range(4, 25)},
        "answer": lambda v: v.p * (2 * v.n + v.more),
    },
    {
        "name": "shopping-bundle",
        "texts": [
            "A single {x.one} costs ${single}, but a pack of {k} costs ${pack}. {a} needs {n} {x}. How much "
            "does {a.he} save by buying packs instead of single ones?",
            "The shop sells {x} for ${single} each or in packs of {k} for ${pack}. {a} wants exactly {n} {x}. "
            "What is the difference in price between buying them one at a time and buying packs?",
        ],
        "slots": {"x": nouns("light bulb, juice carton, tennis ball, candle, paintbrush/paintbrushes")},
        "numbers": {"single": range(3, 8), "k": [4, 5, 6], "packs": range(2, 6), "off": range(2, 6)},
        "derive": lambda v: {"pack": v.single * v.k - v.off, "n": v.packs * v.k},
        "answer": lambda v: v.off * v.packs,
    },
    {
        "name": "shopping-phone-plan",
        "texts": [
            "{a}'s phone plan costs ${base} a month and includes {free} minutes of calls. Each extra minute "
            "costs {cents} cents. Last month {a.he} talked for {used} minutes. What was {a.his} bill in "
            "dollars?",
            "For ${base} a month {a} gets {free} free minutes; after that, every minute is {cents} cents. How "
            "much does {a.he} pay for a month with {used} minutes of calls?",
        ],
        "numbers": {
            "base": range(12, 31, 2),
            "free": [100, 150, 200],
            "extra": range(20, 121, 10),
            "cents": [5, 10, 15, 20],
        },
        "derive": lambda v: {"used": v.free + v.extra},
        "answer": lambda v: v.base + v.extra * v.cents / 100,
        "clean": "cents",
    },
    {
        "name": "shopping-cinema",
        "texts": [
            "Cinema tickets are ${adult} for adults and ${child} for children. A group of {total} people paid "
            "${paid} in all. How many of them were children?",
            "A group of {total} people went to the cinema. Adults paid ${adult} each and children ${child} "
            "each, ${paid} altogether. How many adults and how many children were there?",
        ],
        "numbers": {"adult": range(9, 15), "child": range(5, 9), "adults": range(2, 9), "kids": range(3, 15)},
        "derive": lambda v: {"total": v.adults + v.kids, "paid": v.adults * v.adult + v.kids * v.child},
        "answer": lambda v: (v.kids, v.adults),
    },
    {
        "name": "shopping-garden-centre",
        "heldout": True,
        "texts": [
            "At the garden centre a {x.one} costs ${p} and a bag of soil costs ${q}. {a} has ${budget}. After "
            "buying {bags} bags of soil, how many {x} can {a.he} still afford, and how much money is left over?",
            "{a} goes to the garden centre with ${budget}. First {a.he} buys {bags} bags of soil at ${q} each, "
            "then as many {x} as possible at ${p} each. How many does {a.he} get, and what remains of the "
            "money?",
        ],
        "slots": {"x": nouns("rose bush/rose bushes, fern, lavender plant, tomato plant")},
        "numbers": {"p": range(4, 10), "q": range(6, 12), "bags": [2, 3], "n": range(3, 9), "left": range(1, 4)},
        "derive": lambda v: {"budget": v.p * v.n + v.q * v.bags + v.left},
        "answer": lambda v: (v.n, v.left),
    },
    {
        "name": "savings-bicycle",
        "texts": [
            "{a} wants to buy a {x} that costs ${price}. {a.He} already has ${have} and saves ${week} every "
            "week. In how many weeks can {a.he} buy it?",
            "A {x} costs ${price}. {a} has put aside ${have} so far and adds ${week} a week. How many more "
            "weeks will it take?",
        ],
        "slots": {"x": ["bicycle", "skateboard", "guitar", "telescope", "tent", "camera"]},
        "numbers": {"have": range(20, 91, 5), "week": range(8, 26), "weeks": range(5, 17)},
        "derive": lambda v: {"price": v.have + v.week * v.weeks},
        "answer": lambda v: (v.price - v.have) / v.week,
    },
    {
        "name": "savings-interest",
        "texts": [
            "{a} puts ${sum} into an account that pays {rate}% simple interest a year. How much money is in the"
            " account after {years} years?",
            "How much interest does a deposit of ${sum} earn in {years} years at a simple interest rate of "
            "{rate}% per year? What is the balance at the end?",
        ],
        "numbers": {"sum": range(400, 5001, 200), "rate": [2, 3, 4, 5], "years": range(2, 9)},
        "answer": lambda v: v.sum * v.rate * v.years / 100,
    },
    {
        "name": "savings-dog-walking",
        "texts": [
            "{a} earns ${pay} for every dog {a.he} walks. {a.He} walks {dogs} dogs a day, {days} days a week, "
            "and spends ${spend} of it each week. How much does {a.he} save in {weeks} weeks?",
            "Walking a dog brings {a} ${pay}. {a.He} has {dogs} dogs to walk on each of {days} days a week and "
            "uses up ${spend} of the weekly earnings. What has {a.he} saved after {weeks} weeks?",
        ],
        "numbers": {
            "pay": range(4, 9),
            "dogs": [2, 3, 4],
            "days": [3, 4, 5],
            "spend": range(15, 41, 5),
            "weeks": range(4, 11),
        },
        "answer": lambda v: v.weeks * (v.pay * v.dogs * v.days - v.spend),
    },
    {
        "name": "savings-two-jars",
        "texts": [
            "{a} has ${x} in a jar and adds ${p} every week. {b} has ${y} and adds ${q} every week. After how "
            "many weeks do they have the same amount, and how much is it?",
            "{b} starts with ${y} and saves ${q} a week, while {a} starts with ${x} and saves ${p} a week. When"
            " will {b} have caught up with {a}?",
        ],
        "numbers": {"y": range(10, 41, 2), "p": range(3, 8), "q": range(8, 15), "weeks": range(4, 13)},
        "derive": lambda v: {"x": v.y + (v.q - v.p) * v.weeks},
        "answer": lambda v: (v.weeks, v.x - v.y),
    },
    {
        "name": "savings-insulation",
        "heldout": True,
        "texts": [
            "New windows cost {a} ${cost}. They lower {a.his} heating bill by ${month} in each of the {months} "
            "cold months of the year. After how many years have the windows paid for themselves?",
            "{a} pays ${cost} for insulation. In {months} months of each year it saves {a.him} ${month} a month"
            " in heating. How many years does it take until the savings equal the cost?",
        ],
        "numbers": {"month": range(20, 61, 5), "months": [5, 6, 7], "years": range(4, 12)},
        "derive": lambda v: {"cost": v.month * v.months * v.years},
        "answer": lambda v: v.years,
    },
    {
        "name": "percent-discount",
        "texts": [
            "A {x} that normally costs ${price} is on sale for {off}% off. {a} also has a coupon worth "
            "${coupon}, which is subtracted after the discount. How much does {a.he} pay?",
            "The price of a {x} is ${price}. The shop takes {off}% off, and at the till {a} uses a ${coupon} "
            "voucher. What does {a.he} pay in the end?",
        ],
        "slots": {"x": ["winter coat", "desk lamp", "backpack", "coffee machine", "pair of boots", "keyboard"]},
        "numbers": {"price": range(60, 301, 20), "off": [10, 15, 20, 25, 30, 40], "coupon": range(5, 16, 5)},
        "answer": lambda v: v.price * (100 - v.off) / 100 - v.coupon,
    },
    {
        "name": "percent-exam",
        "texts": [
            "A test has {total} questions. {a} answered {right} of them correctly, and {b} got {percent}% "
            "right. Who did better, and by how many questions?",
            "{b} solved {percent}% of the {total} questions in a quiz, and {a} solved {right}. How many "
            "questions did {b} solve, and what is the difference between the two?",
        ],
        "numbers": {"total": [40, 50, 60, 80], "right": range(25, 40), "percent": [55, 60, 65, 75, 80, 85, 90]},
        "answer": lambda v: (v.total * v.percent / 100, abs(v.total * v.percent / 100 - v.right)),
    },
    {
        "name": "percent-population",
        "texts": [
            "The village of {town} had {people} inhabitants. In one year the number grew by {up}%, and the next"
            " year it fell by {down}%. How many people live there now?",
            "{people} people lived in {town}. The population rose by {up}% after a railway station opened and "
            "then dropped by {down}% the following year. What is the population now?",
        ],
        "slots": {"town": ["Oakridge", "Lindholm", "Saint-Aubin", "Millbrook", "Rosendal", "Kirkby"]},
        "numbers": {"people": range(800, 4001, 200), "up": [5, 10, 15, 20], "down": [5, 10, 20]},
        "answer": lambda v: v.people * (100 + v.up) * (100 - v.down) / 10000,
    },
    {
        "name": "percent-tip",
        "texts": [
            "{a} and {n} friends have dinner for ${bill}. They leave a {tip}% tip and split everything equally."
            " How much does each person pay?",
            "Dinner for {a} and {n} friends came to ${bill} before the tip. With a tip of {tip}%, what is each "
            "person's equal share?",
        ],
        "numbers": {"n": [2, 3, 4, 5], "bill": range(60, 241, 10), "tip": [10, 15, 20]},
        "answer": lambda v: v.bill * (100 + v.tip) / 100 / (v.n + 1),
        "clean": "cents",
    },
    {
        "name": "percent-school-trip",
        "heldout": True,
        "texts": [
            "There are {total} pupils in a school. {walk}% of them walk, {bus}% come by bus and all the others "
            "cycle. How many pupils cycle to school?",
            "Of the {total} pupils at a school, {walk}% come on foot and {bus}% by bus. The rest ride a bike. "
            "How many pupils ride a bike?",
        ],
        "numbers": {"total": range(240, 901, 60), "walk": [20, 25, 30, 35], "bus": [35, 40, 45, 50]},
        "answer": lambda v: v.total * (100 - v.walk - v.bus) / 100,
    },
]
