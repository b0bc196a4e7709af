"""Values that fit a JSON schema, and objects that nearly do, for hypothesis to draw."""

from typing import Any

from hypothesis import strategies as st

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MOST_ITEMS = 4
MOST_FIELDS = 5  # of those that may be left out
FAR = 2**40


class SchemaValues:
    """Strategies by the schemas of an OpenAPI document. preferred: values that a field of this name often has."""

    def __init__(self, document: dict[str, Any], preferred: dict[str, st.SearchStrategy[Any]]) -> None:
        self._definitions = document["components"]["schemas"]
        self._preferred = preferred
        self._named: dict[str, st.SearchStrategy[Any]] = {}

    def of(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        """Values that fit the schema."""
        if "$ref" in schema:
            return self._of_name(schema["$ref"].rsplit("/", 1)[-1])
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if alternatives:
            return st.one_of(*(self.of(one) for one in alternatives))
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        return st.just(schema["const"]) if "const" in schema else self._of_type(schema)

    def near(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        """Objects that fit it but for some fields, which are missing, hold anything, or were never heard of."""
        fields = self._definitions[schema["$ref"].rsplit("/", 1)[-1]]["properties"]
        spoilt = st.dictionaries(st.sampled_from([*sorted(fields), "unheard"]), ANYTHING, min_size=1, max_size=2)
        missing = st.sets(st.sampled_from(sorted(fields)), max_size=1)

        def spoil(fitting: dict[str, Any], changed: dict[str, Any], gone: set[str]) -> dict[str, Any]:
            return {name: value for name, value in (fitting | changed).items() if name not in gone}

        return st.builds(spoil, self.of(schema), spoilt, missing)

    def _of_name(self, name: str) -> st.SearchStrategy[Any]:
        if name not in self._named:
            self._named[name] = st.deferred(lambda: self._of_type(self._definitions[name]))
        return self._named[name]

    def _of_type(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        match schema.get("type"):
            case "string":
                least = schema.get("minLength", 0)
                return TEXT if least == 0 else TEXT.filter(lambda text: len(text) >= least)
            case "integer":
                most = schema.get("maximum", schema.get("exclusiveMaximum", FAR) - 1)
                return st.integers(schema.get("minimum", -FAR), most)
            case "number":
                return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
            case "array":
                most = min(schema.get("maxItems", MOST_ITEMS), MOST_ITEMS)
                return st.lists(self.of(schema["items"]), min_size=schema.get("minItems", 0), max_size=most)
            case "object":
                return self._object(schema)
        return ANYTHING

    def _object(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        fields, required = schema.get("properties", {}), schema.get("required", [])
        if not fields:
            other = schema.get("additionalProperties", True)
            values = self.of(other) if isinstance(other, dict) else ANYTHING
            return st.dictionaries(TEXT, values, max_size=3)
        values_of = {name: self._preferred.get(name, self.of(field)) for name, field in fields.items()}
        always = st.fixed_dictionaries({name: values_of[name] for name in required})
        optional = [st.tuples(st.just(name), values_of[name]) for name in sorted(fields.keys() - set(required))]
        if not optional:
            return always
        some = st.lists(st.one_of(*optional), max_size=MOST_FIELDS)
        return st.builds(lambda must, may: must | dict(may), always, some)
