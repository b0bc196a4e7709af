"""Math problems in Chinese; the fields are those of the English ones."""

# ruff: noqa: RUF001 - Chinese punctuation is meant

from typing import Any

TEMPLATES: list[dict[str, Any]] = [
    {
        "name": "zh-shopping-fruit",
        "texts": [
            "{a}去水果店买了{n}斤{x}和{m}斤{y}，{x}每斤{p}元，{y}每斤{q}元。{a.he}付了100元，应该找回多少钱？",
            "{x}每斤{p}元，{y}每斤{q}元。妈妈让{a}买{n}斤{x}、{m}斤{y}，给了{a.he}100元，最后还剩多少元？",
        ],
        "cases": [
            {"x": "苹果", "y": "葡萄"},
            {"x": "香蕉", "y": "草莓"},
            {"x": "橙子", "y": "樱桃"},
            {"x": "梨", "y": "桃子"},
        ],
        "numbers": {"n": range(2, 6), "m": range(2, 5), "p": range(4, 10), "q": range(5, 13)},
        "answer": lambda v: 100 - v.n * v.p - v.m * v.q,
    },
    {
        "name": "zh-distance-meeting",
        "texts": [
            "甲、乙两地相距{far}千米，一辆客车和一辆货车同时从两地相对开出，客车每小时行{u}千米，货车"
            "每小时行{w}千米。几小时后两车相遇？",
            "{a}和{b}分别从相距{far}千米的两地同时开车相向而行，{a}每小时行{u}千米，{b}每"
            "小时行{w}千米。请问他们多少小时后相遇？",
        ],
        "numbers": {"u": range(60, 101, 10), "w": range(50, 91, 10), "hours": range(2, 7)},
        "derive": lambda v: {"far": (v.u + v.w) * v.hours},
        "answer": lambda v: v.far / (v.u + v.w),
    },
    {
        "name": "zh-age-father",
        "texts": [
            "{a}今年{child}岁，爸爸今年{father}岁。再过几年，爸爸的年龄正好是{a}的2倍？",
            "爸爸今年{father}岁，{a}今年{child}岁。几年后爸爸的岁数会是{a}的两倍？",
        ],
        "numbers": {"child": range(6, 14), "years": range(8, 20)},
        "derive": lambda v: {"father": v.years + 2 * v.child},
        "where": lambda v: 24 <= v.father - v.child <= 35,
        "answer": lambda v: v.father - 2 * v.child,
    },
    {
        "name": "zh-percent-sale",
        "texts": [
            "一件{x}原价{price}元，商场打{fold}折出售，{a}还有一张{coupon}元的优惠券可以再减。{a.he}实际要付多少元？",
            "商场里一件{x}标价{price}元，现在打{fold}折，会员再减{coupon}元。{a}是"
            "会员，买这件{x}要花多少钱？比原价便宜多少？",
        ],
        "slots": {"x": ["羽绒服", "毛衣", "外套", "衬衫", "连衣裙"]},
        "numbers": {"price": range(120, 601, 40), "fold": [6, 7, 8, 9], "coupon": [10, 20, 30]},
        "answer": lambda v: v.price * v.fold / 10 - v.coupon,
    },
    {
        "name": "zh-work-road",
        "texts": [
            "修一条路，甲队单独修需要{p}天，乙队单独修需要{q}天。两队合修，需要多少天完成？",
            "一项工程，由{a}单独做{p}天完成，由{b}单独做{q}天完成。如果两人合作，几天可以做完？",
        ],
        "numbers": {"p": [3, 4, 6, 10, 12, 15, 20, 30], "q": [6, 12, 15, 20, 24, 30, 60]},
        "where": lambda v: v.p < v.q,
        "answer": lambda v: v.p * v.q / (v.p + v.q),
    },
    {
        "name": "zh-area-garden",
        "heldout": True,
        "texts": [
            "一块长方形菜地长{l}米，宽{w}米，四周围上篱笆，每米篱笆{p}元。菜地的面积是多少平方米？围"
            "篱笆一共要花多少元？",
            "{a}家有一个长{l}米、宽{w}米的长方形院子，要在四周装栅栏，每米{p}元。院子的面积是多少？装栅栏需要多少钱？",
        ],
        "numbers": {"l": range(12, 31), "w": range(5, 12), "p": range(6, 20)},
        "answer": lambda v: 2 * (v.l + v.w) * v.p,
    },
]
