"""Word tables the templates share: people with their pronouns, nouns with singular and plural."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Person:
    """`{a}` prints the name, `{a.he}`, `{a.his}`, `{a.him}` the pronouns, capitalised as `{a.He}`, `{a.His}`."""

    name: str
    he: str
    his: str
    him: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:  # noqa: N802 - the capital is the point
        return self.he.capitalize()

    @property
    def His(self) -> str:  # noqa: N802
        return self.his.capitalize()


@dataclass(frozen=True)
class Noun:
    """`{item}` prints the plural, `{item.one}` the singular."""

    one: str
    many: str

    def __str__(self) -> str:
        return self.many


def nouns(text: str) -> list[Noun]:
    """Nouns from "apple, peach/peaches": the plural is the singular with s unless written after a slash."""
    pairs = [word.strip().partition("/") for word in text.split(",")]
    return [Noun(one, many or one + "s") for one, _, many in pairs]


def _people(names: str, he: str, his: str, him: str) -> list[Person]:
    return [Person(name, he, his, him) for name in names.split()]


PEOPLE = {
    "en": _people(
        "Maya Priya Aisha Lena Hana Nadia Clara Ingrid Ruth Elif Wanda Grace Sofia Keiko Zoe Amara Julia Mei",
        *("she", "her", "her"),
    )
    + _people(
        "Tom Diego Ben Kofi Oliver Leo Yusuf Marek Samir Jamal Noah Pavel Tariq Anton Victor Hugo Daniel Ravi",
        *("he", "his", "him"),
    ),
    "zh": _people("小明 小刚 小强 小军 张伟 李雷 王浩 陈晨 阿杰", "他", "他的", "他")
    + _people("小红 小丽 小芳 小雨 李娜 王芳 刘洋 赵敏 思琪", "她", "她的", "她"),
}
