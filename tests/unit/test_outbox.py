"""What a run has to say reaches the store once, in order, also when the store was away."""

import math

import pytest

from dspark import outbox
from dspark.outbox import Measured, Outbox, StoreAway, clean_name, flatten_params


class Store:
    """Keeps what it is sent, except while it is away."""

    def __init__(self) -> None:
        self.away = False
        self.num_calls = 0
        self.metrics: list[tuple[str, float, int]] = []
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}

    def send(self, metrics: list[Measured], params: dict[str, str], tags: dict[str, str]) -> None:
        self.num_calls += 1
        if self.away:
            raise StoreAway("connection refused")
        assert len(metrics) + len(params) + len(tags) <= 1000
        assert len(params) <= 100
        assert len(tags) <= 100
        self.metrics += [(name, value, step) for name, value, _, step in metrics]
        self.params |= params
        self.tags |= tags


@pytest.fixture
def store() -> Store:
    return Store()


def test_everything_is_sent_once_in_order_and_in_batches_mlflow_takes(store: Store) -> None:
    box = Outbox(store.send)
    for step in range(1200):
        box.add_metric("loss", float(step), step)
    for i in range(250):
        box.add_param(f"p{i}", "1")
        box.add_tag(f"t{i}", "1")
    box.flush()
    box.flush()
    assert store.metrics == [("loss", float(step), step) for step in range(1200)]
    assert len(store.params) == len(store.tags) == 250
    assert box.num_lost == 0


def test_what_was_measured_while_the_store_was_away_is_sent_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "PAUSE_S", 0.0)
    box = Outbox(store.send)
    store.away = True
    for step in range(3):
        box.add_metric("loss", 1.0, step)
        box.flush()
    store.away = False
    box.add_metric("loss", 1.0, 3)
    box.flush()
    assert [step for _, _, step in store.metrics] == [0, 1, 2, 3]


def test_a_store_that_is_away_is_asked_once_a_pause_and_complained_of_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    box = Outbox(store.send)
    store.away = True
    for step in range(100):
        box.add_metric("loss", 1.0, step)
        box.flush()
    assert store.num_calls == 1
    assert len(caplog.records) == 1
    box.flush(force=True)
    assert store.num_calls == 2
    assert len(caplog.records) == 1


def test_what_is_held_is_bounded_and_the_rest_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "NUM_HELD", 10)
    box = Outbox(store.send)
    for step in range(25):
        box.add_metric("loss", 1.0, step)
    assert box.num_lost == 25
    box.flush()
    assert [step for _, _, step in store.metrics] == list(range(15, 25))
    assert box.num_lost == 15


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_are_counted_and_never_sent(store: Store, value: float) -> None:
    box = Outbox(store.send)
    for step, measured in enumerate([1.0, value, value, 2.0]):
        box.add_metric("loss", measured, step)
    box.flush()
    assert store.metrics == [("loss", 1.0, 0), ("loss.nonfinite", 1.0, 1), ("loss.nonfinite", 2.0, 2), ("loss", 2.0, 3)]
    assert store.tags == {"dspark.nonfinite.loss": f"{value} at step 2"}


def test_the_count_of_nonfinite_values_goes_on_after_a_resume(store: Store) -> None:
    box = Outbox(store.send)
    box.continue_from({}, {"loss": 3.0, "loss.nonfinite": 4.0})
    box.add_metric("loss", math.nan, 9)
    box.flush()
    assert store.metrics == [("loss.nonfinite", 5.0, 9)]


def test_a_param_with_another_value_after_a_resume_becomes_a_tag(store: Store) -> None:
    box = Outbox(store.send)
    box.continue_from({"lr": "0.1", "seed": "1"}, {})
    for name, value in {"lr": "0.2", "seed": "1", "new": "3"}.items():
        box.add_param(name, value)
    box.flush()
    assert store.params == {"new": "3"}
    assert store.tags == {"dspark.changed.lr": "0.2"}


def test_flatten_params_names_every_leaf_by_its_path() -> None:
    nested = {"a": {"b": {"c": 1}, "d": None}, "e": [1, "x"], "f": "text", "g": {}, "h": True}
    assert flatten_params(nested) == {"a.b.c": "1", "a.d": "null", "e": '[1, "x"]', "f": "text", "g": "{}", "h": "true"}


def test_clean_name_replaces_what_mlflow_refuses_and_bounds_the_length() -> None:
    assert clean_name("acceptance@4 (math)[k]") == "acceptance_4 _math__k_"
    assert len(clean_name("x" * 300)) == 250
