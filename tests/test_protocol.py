"""Messages survive the wire, and whatever a peer sends is a message or ``MalformedMessage``."""

import io
import pickle
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given
from hypothesis import strategies as st

from coterie.config import Assignment, Weighting
from coterie.flower import from_record, to_record
from coterie.mechanisms.events import Neighbourhood
from coterie.protocol import (
    Acknowledgement,
    Fields,
    HypothesesMessage,
    MalformedMessage,
    PrivacyProposal,
    Refusal,
    TrainRequest,
    UpdateReply,
    ValidationReply,
    parse_reply,
)
from coterie.tasks import TrainingSettings

HYPOTHESES = np.array([[1.5, -0.0, 3e38], [np.float32(1e-45), 2, -7]], np.float32)


def over_the_wire(fields: Fields) -> Fields:
    """Through Flower's records and its own serialisation, byte for byte what a socket carries."""
    record = to_record(fields)
    objects = {key: part.deflate() for key, part in get_all_nested_objects(record).items()}
    received = inflate_object_from_contents(record.object_id, objects)
    assert isinstance(received, RecordDict)
    return from_record(received)


def same(left: Any, right: Any) -> bool:
    """Equality of frozen messages whose arrays are compared bit for bit."""
    assert type(left) is type(right)
    for name, value in vars(left).items():
        other = getattr(right, name)
        if isinstance(value, np.ndarray):
            assert (value.dtype, value.shape, value.tobytes()) == (other.dtype, other.shape, other.tobytes())
        else:
            assert (type(value), value) == (type(other), other), name
    return True


@pytest.mark.parametrize("assignment", list(Assignment))
@pytest.mark.parametrize("weighting", list(Weighting))
@pytest.mark.parametrize(
    "proposal",
    [
        PrivacyProposal(),
        PrivacyProposal(noise_multiplier=0.1),
        PrivacyProposal(neighbourhood=Neighbourhood.RELATIVE),
        PrivacyProposal(3.0, Neighbourhood.FIXED, 1e-3),
    ],
)
def test_train_requests_come_back_as_they_were(
    assignment: Assignment, weighting: Weighting, proposal: PrivacyProposal
) -> None:
    request = TrainRequest(
        "run ü", 2**31 - 1, "hospital", HYPOTHESES, assignment, weighting, TrainingSettings(3, 0.1, 7), proposal
    )
    assert same(TrainRequest.parse(over_the_wire(request.to_fields())), request)


def test_hypotheses_come_back_as_they_were() -> None:
    message = HypothesesMessage("run", 1, "pkg.mod:task", HYPOTHESES)
    assert same(HypothesesMessage.parse(over_the_wire(message.to_fields())), message)


@pytest.mark.parametrize(
    "reply",
    [
        UpdateReply("id", HYPOTHESES[0], None, None),
        UpdateReply("id", HYPOTHESES[0], 0, 1),
        UpdateReply("id", np.array([np.nan, np.inf], np.float32), -1, 2**31 - 1),
        ValidationReply(0.1, -2.0),
        ValidationReply(float("inf"), 0.0),
        Acknowledgement(),
        Refusal("too little noise"),
        Refusal("budget", exhausted=True),
    ],
)
def test_replies_come_back_as_they_were(reply: Any) -> None:
    assert same(parse_reply(over_the_wire(reply.to_fields())), reply)


def test_the_hypotheses_travel_as_one_array() -> None:
    assert list(HypothesesMessage("run", 1, "t", HYPOTHESES).to_fields().arrays) == ["hypotheses"]


TRAIN = TrainRequest(
    "run", 1, "t", HYPOTHESES, Assignment.CLIENT, Weighting.EQUAL, TrainingSettings(), PrivacyProposal()
).to_fields()


@pytest.mark.parametrize("missing", list(TRAIN.scalars))
def test_a_missing_field_is_named(missing: str) -> None:
    scalars = {name: value for name, value in TRAIN.scalars.items() if name != missing}
    with pytest.raises(MalformedMessage, match=missing):
        TrainRequest.parse(Fields(scalars, TRAIN.arrays))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", ""),
        ("run", 3),
        ("round", 0),
        ("round", True),
        ("round", 1.0),
        ("round", "1"),
        ("round", 2**63),  # beyond SQLite's integers
        ("batch-size", 2**64 - 1),  # beyond torch's
        ("assignment", "nobody"),
        ("assignment", True),
        ("epochs", 0),
        ("step-size", 0.0),
        ("step-size", float("nan")),
        ("step-size", float("inf")),
        ("batch-size", -1),
        ("proposed-noise-multiplier", 0.0),
        ("proposed-noise-multiplier", -1.0),
        ("proposed-noise-multiplier", float("nan")),
        ("proposed-noise-multiplier", True),
        ("proposed-noise-multiplier", "3"),
        ("proposed-clipping-norm", float("inf")),
        ("proposed-neighbourhood", "none"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(name: str, value: Any) -> None:
    with pytest.raises(MalformedMessage, match=name):
        TrainRequest.parse(Fields({**TRAIN.scalars, name: value}, TRAIN.arrays))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3)),
        np.zeros((2, 3), ">f4"),
        np.zeros((2, 3), np.int32),
        np.zeros(3, np.float32),
        np.zeros((1, 2, 3), np.float32),
        np.zeros((0, 3), np.float32),
        np.zeros((3, 0), np.float32),
        np.float32(1.0).reshape(()),
    ],
)
def test_hypotheses_of_another_kind_or_shape_are_malformed(array: np.ndarray) -> None:
    with pytest.raises(MalformedMessage, match=r"shape \(k, n\)"):
        TrainRequest.parse(Fields(TRAIN.scalars, {"hypotheses": array}))


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2), np.float32), np.zeros(3), np.zeros(3, ">f4"), np.array(["a"]), np.zeros((), np.float32)]
)
def test_an_update_of_another_kind_or_shape_is_malformed(array: np.ndarray) -> None:
    with pytest.raises(MalformedMessage, match="vector"):
        parse_reply(Fields({"kind": "update", "release": "r"}, {"vector": array}))


def test_a_reason_is_cut() -> None:
    refusal = parse_reply(Refusal("x" * 10_000).to_fields())
    assert isinstance(refusal, Refusal)
    assert len(refusal.reason) <= 500


def test_the_text_of_an_error_is_bounded() -> None:
    """It is logged, and sent back to the peer."""
    with pytest.raises(MalformedMessage) as caught:
        parse_reply(Fields({f"field {j}": "x" for j in range(10_000)}, {}))
    assert len(str(caught.value)) < 2000
    with pytest.raises(MalformedMessage) as caught:
        parse_reply(Fields({"kind": "x" * 100_000}, {}))
    assert len(str(caught.value)) < 2000


scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),  # what Flower carries
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["update", "validation", "acknowledgement", "refusal", "client", "equal", "fixed"]),
)
names = st.sampled_from(
    [*TRAIN.scalars, "kind", "release", "hypothesis", "rows", "loss", "score", "reason", "exhausted"]
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
arrays = st.builds(np.zeros, shapes, st.sampled_from(["f4", ">f4", "f8", "f2", "i4", "?", "c8", "U1"]))
any_fields = st.builds(
    Fields,
    st.dictionaries(names | st.text(max_size=5), scalars, max_size=12),
    st.dictionaries(st.sampled_from(["hypotheses", "vector", "other"]), arrays, max_size=2),
)
nearly_right = st.builds(
    lambda changes, array: Fields({**TRAIN.scalars, **changes}, {"hypotheses": array, "vector": array}),
    st.dictionaries(names, scalars, max_size=2),
    arrays,
)


@given(any_fields | nearly_right)
def test_only_malformed_message_escapes_the_parsers(fields: Fields) -> None:
    lines = []
    for parse in (TrainRequest.parse, HypothesesMessage.parse, parse_reply):
        try:
            parse(fields)
        except MalformedMessage as error:
            lines.append(str(error))
    assert not any("\n" in line for line in lines)


config_values = st.one_of(
    scalars, st.binary(max_size=4), st.lists(st.integers(0, 9), max_size=3), st.lists(st.floats(), max_size=3)
)
raw_arrays = st.builds(
    Array,
    st.sampled_from(["float32", "object", "nonsense"]),
    shapes,
    st.sampled_from(["numpy.ndarray", "torch", ""]),
    st.binary(max_size=64) | st.sampled_from([b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x00\xff\xff{", b"\x80\x04N."]),
)
records = st.dictionaries(
    st.sampled_from(["scalars", "arrays", "metrics"]),
    st.one_of(
        st.builds(ConfigRecord, st.dictionaries(st.text(max_size=4), config_values, max_size=3)),
        st.builds(ArrayRecord, st.dictionaries(st.text(max_size=4), raw_arrays, max_size=2)),
        st.just(MetricRecord({"a": 1})),
    ),
    max_size=3,
)


@given(records)
def test_only_malformed_message_escapes_the_reading_of_records(content: dict[str, Any]) -> None:
    try:
        fields = from_record(RecordDict(content))
    except MalformedMessage:
        return
    assert all(isinstance(value, bool | int | float | str) for value in fields.scalars.values())
    assert all(isinstance(value, np.ndarray) for value in fields.arrays.values())


def test_a_pickle_in_an_array_is_never_loaded() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("a peer's pickle was executed",)

    saved = io.BytesIO()
    np.save(saved, np.array([Bomb()], dtype=object), allow_pickle=True)
    for data in (saved.getvalue(), pickle.dumps(Bomb())):
        array = Array("object", (1,), "numpy.ndarray", data)
        record = RecordDict({"scalars": ConfigRecord({}), "arrays": ArrayRecord({"vector": array})})
        with pytest.raises(MalformedMessage, match="readable arrays"):
            from_record(record)
