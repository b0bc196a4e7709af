"""Math problems about rates, work, time and distance.

`numbers` are drawn, `derive` computes further ones, and a draw counts only if every value of `answer` is clean
(positive, and whole unless `clean` says otherwise) and `where` holds.
"""

from decimal import Decimal
from typing import Any

TEMPLATES: list[dict[str, Any]] = [
    {
        "name": "rate-novel",
        "texts": [
            "{a} reads {pace} pages an hour. The novel on {a.his} bedside table has {total} pages, and {a.he} "
            "has already read {done} of them. How many more hours does {a.he} need to finish it?",
            "A book has {total} pages. {a} is on page {done} and gets through {pace} pages every hour. How many"
            " hours of reading are left?",
        ],
        "numbers": {"pace": range(18, 46, 2), "hours": range(3, 10), "done": range(40, 160, 6)},
        "derive": lambda v: {"total": v.done + v.pace * v.hours},
        "answer": lambda v: (v.total - v.done) / v.pace,
    },
    {
        "name": "rate-printer",
        "texts": [
            "The office printer turns out {ppm} pages a minute. Someone sends it {copies} copies of a booklet with "
            "{pages} pages. How many minutes will the whole job take?",
            "{a} has to print {copies} copies of a report that is {pages} pages long. If the printer manages "
            "{ppm} pages per minute, how long will {a.he} be standing there?",
        ],
        "numbers": {"ppm": [12, 15, 18, 20, 24, 30], "copies": range(8, 41), "pages": range(6, 31)},
        "answer": lambda v: v.copies * v.pages / v.ppm,
    },
    {
        "name": "rate-leaky-tank",
        "texts": [
            "A pump adds {inflow} litres of water to a tank every minute, but a crack in the bottom loses "
            "{leak} litres a minute. The tank starts empty and holds {capacity} litres. After how many minutes "
            "is it full?",
            "An empty {capacity}-litre tank is being filled at {inflow} litres per minute. Because of a leak, "
            "{leak} litres run out again each minute. How long does it take to fill the tank?",
        ],
        "numbers": {"inflow": range(12, 41), "leak": range(2, 9), "capacity": range(240, 1201, 60)},
        "answer": lambda v: v.capacity / (v.inflow - v.leak),
    },
    {
        "name": "rate-typing-gap",
        "texts": [
            "{a} types {fast} words per minute and {b} types {slow} words per minute. Both start on a "
            "{words}-word document at the same moment. How many minutes later than {a} does {b} finish?",
            "A report has {words} words. {a} types {fast} words a minute, {b} only {slow}. If they both start "
            "typing it at nine o'clock, how many minutes does {b} need after {a} is done?",
        ],
        "numbers": {"fast": [50, 60, 70, 75, 80, 90], "slow": [25, 30, 35, 40, 45], "words": range(900, 6301, 150)},
        "answer": lambda v: (v.words / v.slow - v.words / v.fast, v.words / v.fast),
    },
    {
        "name": "rate-fruit-picking",
        "texts": [
            "{a} picks {some} kilograms of {fruit} in {minutes} minutes. Working at the same pace, how many "
            "kilograms can {a.he} pick in {hours} hours?",
            "On the farm, {a} fills {some} kilos of {fruit} into boxes every {minutes} minutes. How many kilos "
            "is that after {hours} hours without a break?",
        ],
        "slots": {"fruit": ["cherries", "strawberries", "plums", "olives", "apples", "grapes"]},
        "numbers": {"some": range(3, 15), "minutes": [15, 20, 30, 40, 45], "hours": range(2, 8)},
        "answer": lambda v: v.some * v.hours * 60 / v.minutes,
    },
    {
        "name": "rate-bottling",
        "heldout": True,
        "texts": [
            "A machine caps {some} bottles every {seconds} seconds. The bottles are packed into crates of "
            "{crate}. How many full crates does it produce in {minutes} minutes?",
            "Every {seconds} seconds a filling line closes {some} bottles, and {crate} bottles fit into a "
            "crate. How many crates are filled after {minutes} minutes?",
        ],
        "numbers": {
            "some": range(4, 13),
            "seconds": [10, 12, 15, 20],
            "minutes": range(5, 31, 5),
            "crate": [12, 20, 24],
        },
        "answer": lambda v: v.some * v.minutes * 60 / v.seconds / v.crate,
    },
    {
        "name": "distance-two-trains",
        "texts": [
            "Two trains leave {x} and {y}, which are {far} km apart, at the same time and travel towards each "
            "other. One goes {u} km/h, the other {w} km/h. After how many hours do they meet?",
            "{x} and {y} are {far} kilometres apart. A train leaves each city at noon heading for the other "
            "one, at {u} km/h and {w} km/h. When do they pass each other?",
        ],
        "cases": [
            {"x": "Northport", "y": "Elmstead"},
            {"x": "Graybridge", "y": "Sandhurst"},
            {"x": "Valmora", "y": "Tessin"},
            {"x": "Harwick", "y": "Bellford"},
            {"x": "Kestrel Bay", "y": "Dunmore"},
        ],
        "numbers": {"u": range(60, 101, 10), "w": range(70, 131, 10), "hours": range(2, 6)},
        "derive": lambda v: {"far": (v.u + v.w) * v.hours},
        "answer": lambda v: v.far / (v.u + v.w),
    },
    {
        "name": "distance-hike-average",
        "texts": [
            "{a} hikes {up} hours uphill at {slow} km/h and then {down} hours downhill at {fast} km/h. What is "
            "{a.his} average speed for the whole hike?",
            "On a mountain tour {a} climbs for {up} hours at {slow} km/h and walks down for {down} hours at "
            "{fast} km/h. How long is the tour, and what is the average speed?",
        ],
        "numbers": {"up": [2, 3, 4], "slow": [2, 3], "down": [2, 3, 5], "fast": [4, 5, 6]},
        "answer": lambda v: (v.up * v.slow + v.down * v.fast) / (v.up + v.down),
        "clean": "tenths",
    },
    {
        "name": "distance-commute-fuel",
        "texts": [
            "{a} drives {km} km to work and the same way back, {days} days a week. {a.His} car uses {use} "
            "litres per 100 km, and fuel costs ${price} a litre. What does {a.he} spend on fuel in a week?",
            "The way to work is {km} km, and {a} drives there and back {days} times a week. With a consumption "
            "of {use} litres per 100 km and a price of ${price} per litre, how much is the fuel for a week?",
        ],
        "numbers": {
            "km": range(15, 51, 5),
            "days": [4, 5],
            "use": [5, 6, 8],
            "price": [Decimal("1.50"), 2, Decimal("1.80")],
        },
        "answer": lambda v: v.km * 2 * v.days * v.use / 100 * v.price,
        "clean": "cents",
    },
    {
        "name": "distance-catch-up",
        "texts": [
            "{a} leaves home on foot at {walk} km/h. {wait} minutes later {b} sets off after {a.him} by bicycle"
            " at {ride} km/h. How many minutes does {b} need to catch up?",
            "{a} walks at {walk} km/h and has a head start of {wait} minutes. {b} follows on a bike at {ride} "
            "km/h. After how many minutes of cycling does {b} reach {a}?",
        ],
        "numbers": {"walk": [4, 5, 6], "wait": [15, 20, 30, 45], "ride": [12, 14, 15, 16, 20]},
        "answer": lambda v: v.walk * v.wait / (v.ride - v.walk),
    },
    {
        "name": "distance-running-laps",
        "texts": [
            "One lap of the park is {lap} metres. {a} runs {n} laps on Monday, {more} more laps on Wednesday "
            "than on Monday, and half of Monday's number on Friday. How many kilometres is that in the week?",
            "{a} trains on a loop of {lap} metres: {n} rounds on Monday, {more} more than that on Wednesday, and on"
            " Friday half as many as on Monday. What distance in kilometres does {a.he} cover altogether?",
        ],
        "numbers": {"lap": [400, 600, 800, 1200], "n": range(4, 13, 2), "more": range(1, 5)},
        "answer": lambda v: v.lap * (2 * v.n + v.more + v.n / 2) / 1000,
        "clean": "tenths",
    },
    {
        "name": "distance-cyclist",
        "heldout": True,
        "texts": [
            "A cyclist rides from {x} to {y} at {u} km/h and takes {hours} hours. On the way back a headwind "
            "slows the ride to {w} km/h. How much longer does the return trip take?",
            "Riding at {u} km/h, {a} gets from {x} to {y} in {hours} hours. The next day {a.he} returns at {w} "
            "km/h. How many hours is {a.he} on the road in total?",
        ],
        "cases": [
            {"x": "Ashby", "y": "Lowmere"},
            {"x": "Fenwick", "y": "Castlerigg"},
            {"x": "Odell", "y": "Pine Lake"},
        ],
        "numbers": {"u": [18, 20, 24, 25, 30], "hours": range(2, 6), "w": [12, 15, 16, 20]},
        "where": lambda v: v.w < v.u,
        "answer": lambda v: v.u * v.hours / v.w - v.hours,
        "clean": "tenths",
    },
    {
        "name": "time-film",
        "texts": [
            "A film starts at {hour}:{minute} pm and lasts {length} minutes, with a {pause}-minute break in the"
            " middle. At what time does it end?",
            "{a} starts watching a film of {length} minutes at {hour}:{minute} pm and pauses it once for {pause} "
            "minutes to make tea. What time is it when the film is over?",
        ],
        "numbers": {
            "hour": [5, 6, 7, 8],
            "minute": [10, 15, 25, 40, 45],
            "length": range(85, 151, 5),
            "pause": [10, 15, 20],
        },
        "answer": lambda v: v.length,
    },
    {
        "name": "time-bus-line",
        "texts": [
            "Bus A leaves the station every {x} minutes and bus B every {y} minutes. Both leave together at "
            "{hour}:00. When is the next time they leave together?",
            "At {hour} o'clock two trams set off together. The red line runs every {x} minutes, the blue line "
            "every {y} minutes. After how many minutes do both depart at the same moment again?",
        ],
        "numbers": {"x": [8, 10, 12, 14, 16], "y": [15, 18, 20, 24, 25], "hour": [6, 7, 8, 9]},
        "answer": lambda v: v.x * v.y,
    },
    {
        "name": "time-shift-pay",
        "texts": [
            "{a} works from {start} am to {end} pm with an unpaid break of {pause} minutes. {a.He} earns ${pay}"
            " an hour. How much does {a.he} earn in {days} such days?",
            "A shift goes from {start} am until {end} pm, and {pause} minutes of it are an unpaid break. At "
            "${pay} an hour, what does {a} earn in {days} shifts?",
        ],
        "numbers": {
            "start": [7, 8, 9],
            "end": [3, 4, 5, 6],
            "pause": [30, 60],
            "pay": range(12, 25, 2),
            "days": range(2, 6),
        },
        "answer": lambda v: (12 - v.start + v.end - v.pause / 60) * v.pay * v.days,
    },
    {
        "name": "time-medicine",
        "texts": [
            "{a} has to take {dose} tablets every {gap} hours for {days} days. The tablets come in packs of "
            "{pack}. How many packs must {a.he} buy?",
            "For {days} days, {a} takes {dose} pills every {gap} hours. How many packs of {pack} pills does "
            "{a.he} need?",
        ],
        "numbers": {"dose": [2, 3], "gap": [6, 8, 12], "days": [5, 6, 7, 8, 10], "pack": [6, 8, 10, 12, 20]},
        "answer": lambda v: v.dose * 24 * v.days / v.gap / v.pack,
    },
    {
        "name": "time-slow-clock",
        "heldout": True,
        "texts": [
            "An old clock loses {lose} minutes every {hours} hours. {a} sets it correctly at noon on Monday. "
            "How many minutes slow is it at noon on {day}?",
            "{a}'s clock runs slow: it falls {lose} minutes behind every {hours} hours. If it is right at noon "
            "on Monday, how far behind is it at noon on {day}?",
        ],
        "slots": {"day": ["Wednesday", "Thursday", "Saturday"]},
        "numbers": {"lose": [2, 3, 4], "hours": [4, 6, 8, 12]},
        "answer": lambda v: 24 * v.lose / v.hours,
    },
    {
        "name": "work-two-painters",
        "texts": [
            "{a} can paint a {x} in {p} hours, and {b} needs {q} hours for the same job. How many hours do they"
            " need if they work together?",
            "Alone, {a} finishes a {x} in {p} hours; {b} takes {q} hours. How long does the job take when both "
            "paint it together?",
        ],
        "slots": {"x": ["fence", "garage", "room", "shed"]},
        "numbers": {"p": [3, 4, 5, 6, 10, 12, 15, 20], "q": [6, 12, 15, 20, 24, 30]},
        "where": lambda v: v.p < v.q,
        "answer": lambda v: v.p * v.q / (v.p + v.q),
        "clean": "tenths",
    },
    {
        "name": "work-more-workers",
        "texts": [
            "{n} workers lay a stretch of road in {days} days. How many days would {m} workers need for the "
            "same stretch, if everyone works equally fast?",
            "It takes {n} gardeners {days} days to plant a park. If {m} gardeners come instead, how many days "
            "will they need?",
        ],
        "numbers": {"n": range(4, 13), "days": range(6, 21), "m": range(3, 17)},
        "where": lambda v: v.n != v.m,
        "answer": lambda v: v.n * v.days / v.m,
    },
    {
        "name": "work-envelopes",
        "texts": [
            "{a} folds {p} letters in {t} minutes and {b} folds {q} letters in the same time. How long do they "
            "need together for {total} letters?",
            "In {t} minutes {a} packs {p} parcels and {b} packs {q}. How many minutes will it take the two of "
            "them to pack {total} parcels?",
        ],
        "numbers": {"p": range(6, 15), "q": range(5, 13), "t": [2, 3, 4, 5], "rounds": range(6, 21)},
        "derive": lambda v: {"total": (v.p + v.q) * v.rounds},
        "answer": lambda v: v.rounds * v.t,
    },
    {
        "name": "work-two-pipes",
        "heldout": True,
        "texts": [
            "One pipe fills a pool in {p} hours and another fills it in {q} hours. Both are opened at the same "
            "time. How many hours does it take to fill the pool?",
            "A hose needs {q} hours to fill a pond; a stronger hose needs {p} hours. How long does it take with"
            " both hoses running?",
        ],
        "numbers": {"p": [4, 6, 8, 10, 12], "q": [12, 15, 24, 30, 40]},
        "where": lambda v: v.p < v.q,
        "answer": lambda v: v.p * v.q / (v.p + v.q),
    },
]
