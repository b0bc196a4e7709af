"""What is taken out of texts, on made-up people, in the midst of other text; and what stays."""

import random
import time

import pytest
from pydantic import ValidationError

from dspark.traffic.config import RuleName, TextsConfig
from dspark.traffic.redaction import PATTERNS, Redactor

SECRETS = {
    "email": ["ada.lovelace+news@mail.example.co.uk", "jörg@exämple.de", "x_1@a-b.org"],
    "phone": ["+49 170 1234567", "+1 (415) 555-2671", "(415) 555-2671", "0170 / 123 45 67", "0049309876"],
    "key": [
        "sk-proj-abcdefghijklmnop1234",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def_ghi",
        "9f86d081884c7d659a2feaa0c55ad015",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY12",
    ],
    "card": ["4111 1111 1111 1111", "5500-0000-0000-0004", "378282246310005"],
    "iban": ["DE89 3704 0044 0532 0130 00", "GB29NWBK60161331926819"],
    "address": ["192.168.17.4", "2001:0db8:85a3:0000:0000:8a2e:0370:7334", "fe80::1ff:fe23:4567:890a"],
    "secret": [
        "password: hunter2",
        'api_key="Zm9v.bar"',
        "Authorization: Bearer abc.def.ghi",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nMIIEowIBAAKC without an end",
    ],
}  # fmt: skip
ALL = list(SECRETS)


def redactor(**options: object) -> Redactor:
    config = TextsConfig(prompts=True, **options)
    return Redactor(config.rules, config.redact, max_characters=config.max_characters)


def parts_of(secret: str) -> list[str]:
    """What must not be left of it: its words of four characters and more."""
    words = secret.replace("=", " ").replace(":", " ").replace('"', " ").split()
    known = {"password", "api_key", "Authorization", "Bearer", "without", "an", "end"}
    return [word for word in words if len(word) > 3 and word not in known]


@pytest.mark.parametrize(("rule", "secret"), [(rule, secret) for rule, some in SECRETS.items() for secret in some])
def test_nothing_of_a_known_shape_is_left_wherever_it_stands(rule: RuleName, secret: str) -> None:
    for before, after in (
        ("", ""),
        ("Write to ", " please."),
        ("(", ")"),
        ("Grüße\n", "\n你好"),
        ("see: ", ", thanks"),
    ):
        told = redactor()
        text = told.clean(before + secret + after)
        assert text.startswith(before.rstrip("(") + "[") or "([" in text, text
        assert not [part for part in parts_of(secret) if part in text], text
        assert sum(told.counts.values()) >= 1
        assert told.clean(text) == text  # what was put in its place fits no rule


def test_many_at_once_are_all_found_and_counted() -> None:
    draw = random.Random(0)
    for _ in range(50):
        chosen = [draw.choice(SECRETS["email"] + SECRETS["address"]) for _ in range(draw.randint(1, 6))]
        told = redactor()
        text = told.clean(" and then ".join(["start", *chosen, "end"]))
        assert told.counts["email"] + told.counts["address"] == len(chosen)
        assert not [secret for secret in chosen if secret in text]


@pytest.mark.parametrize(
    "text",
    [
        "If 1234 apples cost 5678.90 dollars, what do 12345678 cost?",
        "On 2026-08-12 at 12:30:45 the ratio was 3.14159265.",
        "def f(x): return x[0] + y['a'] @ z",
        "The token bucket holds 5 tokens; see section 3.2.1 and lines 10-25.",
        "std::vector<int> v; a:b:c; 10:20",
        "What is 7 * 8 + 415 - 555?",
    ],
)
def test_sums_dates_and_code_stay(text: str) -> None:
    assert redactor().clean(text) == text


def test_rules_can_be_left_out_and_added() -> None:
    told = redactor(rules=["email"], redact={"case": r"\bCASE-\d+\b"})
    assert told.clean("a@b.org of CASE-77 at 192.168.17.4") == "[email] of [case] at 192.168.17.4"
    assert told.counts == {"case": 1, "email": 1}


def test_a_secret_across_the_end_of_what_is_kept_is_not_kept_in_part() -> None:
    told = redactor(max_characters=20)
    for place in range(30):
        text = told.clean("w " * (place // 2) + "ada@mail.example.org and more")
        assert len(text) <= 20
        assert "ada@mail" not in text


def test_half_of_a_surrogate_pair_becomes_valid_text() -> None:
    text = redactor().clean("a \ud83d b")
    assert text.encode().decode() == text
    assert (text[:2], text[-2:]) == ("a ", " b")


@pytest.mark.parametrize(
    "filler", ["a", "a@", "1 ", "sk-", "a-", "::", "0 ", "-----BEGIN A-----", "token", "1.", "é@."]
)
def test_time_grows_with_the_text_only(filler: str) -> None:
    told, seconds = redactor(), []
    for size in (5_000, 20_000):
        started = time.perf_counter()
        told.clean((filler * size)[:size])
        seconds.append(time.perf_counter() - started)
    assert seconds[1] < 0.5, f"{filler!r}: {seconds}"


def test_a_pattern_that_is_none_or_fits_nothing_at_all_is_refused() -> None:
    with pytest.raises(ValidationError, match="no regular expression"):
        TextsConfig(prompts=True, redact={"bad": "("})
    with pytest.raises(ValidationError, match="fits nothing at all"):
        TextsConfig(prompts=True, redact={"bad": "x*"})
    with pytest.raises(ValidationError, match="neither prompts nor answers"):
        TextsConfig()


def test_every_built_in_rule_can_be_named() -> None:
    assert set(TextsConfig(prompts=True).rules) == set(PATTERNS)
