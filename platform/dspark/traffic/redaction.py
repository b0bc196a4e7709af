"""What is taken out of texts before they are kept: things of a known shape, never everything that is private.

Every built-in expression needs time in proportion to the text: they run beside an engine, and hold Python's lock.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

MARGIN = 300  # characters read beyond what is kept, so that nothing is cut in two and thereby missed
_NO = r"\s@<>()\[\],;:\"'"
_DIGIT_BEFORE, _DIGIT_AFTER = r"(?<![\w.])", r"(?![\w])"

# Applied in this order: what holds another is taken out first.
PATTERNS: Mapping[str, str] = {
    # A private key, also where its end is missing; and what follows a word that announces a secret.
    "secret": (
        r"-----BEGIN [A-Z ]{1,40}-----(?:[^-]|-(?!----))*(?:-----END [A-Z ]{1,40}-----)?"
        r"|(?i:\b(?:password|passwd|passphrase|secret|token|api[ _-]?key|authorization)\b[\"']?[ \t]{0,3}[:=][ \t]{0,3}"
        r"(?:(?:bearer|basic)[ \t]{1,3})?[^\s,;]{1,500}|\bbearer[ \t]{1,3}[A-Za-z0-9_.\-/+=]{8,500})"
    ),
    "email": rf"[^{_NO}]{{1,64}}@[^{_NO}]{{1,190}}\.[^{_NO}.]{{2,24}}",
    # Issuers' prefixes, JSON web tokens, long hexadecimal numbers and long runs of what keys are made of.
    "key": (
        r"\b(?:(?:sk|pk|rk|hf|gh[opsur]|glpat|github_pat|xox[abeprs]|AKIA|ASIA|AIza|ya29)[-_.]?[A-Za-z0-9_.\-/+]{12,}"
        r"|eyJ[A-Za-z0-9_.\-]{16,}|[0-9a-fA-F]{32,}|[A-Za-z0-9_+/\-]{40,}={0,2})"
    ),
    "iban": r"\b[A-Z]{2}\d{2}(?:[ ]?[A-Z0-9]{4}){3,7}(?:[ ]?[A-Z0-9]{1,3})?\b",
    "card": rf"{_DIGIT_BEFORE}(?:\d[ -]?){{12,18}}\d{_DIGIT_AFTER}",
    # With a plus or a leading zero, or three groups in the American way; plain numbers stay.
    "phone": (
        rf"{_DIGIT_BEFORE}(?:(?:\+|00)[1-9](?:[ ./()-]{{0,2}}\d){{6,13}}"
        r"|\(?0[1-9]\d{1,4}\)?[ ./-]{1,3}\d(?:[ ./-]?\d){4,9}"
        rf"|\(?[2-9]\d{{2}}\)?[ .-]{{1,2}}\d{{3}}[ .-]\d{{4}}){_DIGIT_AFTER}"
    ),
    # Of a machine: IPv4 and IPv6.
    "address": (
        r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]?\d)"
        r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){3,7}(?::?[0-9a-fA-F]{1,4}){1,2}(?![\w:])"
        r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4}){0,5}(?![\w:])"
    ),
}


class Redactor:
    """Replaces what fits a rule by the rule's name in brackets, and counts it."""

    def __init__(self, names: Sequence[str], more: Mapping[str, str], *, max_characters: int) -> None:
        """names: of PATTERNS. more: further rules, applied first. max_characters: kept of a text's beginning."""
        chosen = {name: pattern for name, pattern in PATTERNS.items() if name in names}
        self._rules = [(name, re.compile(pattern)) for name, pattern in [*more.items(), *chosen.items()]]
        self._max_characters = max_characters
        self.counts: Counter[str] = Counter({name: 0 for name, _ in self._rules})

    def clean(self, text: str) -> str:
        """The text's beginning without what fits a rule. It always is valid Unicode."""
        text = text[: self._max_characters + MARGIN].encode("utf-8", "replace").decode("utf-8")
        for name, rule in self._rules:
            text, number = rule.subn(f"[{name}]", text)
            self.counts[name] += number
        return text[: self._max_characters]
