import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.datasets.partition import choose_partition, deal, mixed_order, name_hash, numbered
from coterie.errors import CoterieError


def test_hash_is_the_first_8_bytes_of_sha256() -> None:
    # SHA-256 of "abc" is FIPS 180-2's example: ba7816bf 8f01cfea …
    assert name_hash("abc") == 0xBA7816BF8F01CFEA


@given(st.sets(st.text("abcé01"), max_size=20), st.randoms())
def test_order_depends_on_the_names_only(names: set[str], random) -> None:
    shuffled = list(names)
    random.shuffle(shuffled)
    assert mixed_order(shuffled) == mixed_order(names)
    assert set(mixed_order(shuffled)) == names


def test_order_mixes_sorted_names() -> None:
    names = [f"{number:06d}" for number in range(1000)]
    first = [int(name) for name in mixed_order(names)[:100]]
    # The mean of 100 of 0..999 without replacement has standard deviation 27; sorted order would give 49.5.
    assert 350 < np.mean(first) < 650


def test_order_is_that_of_sha256() -> None:
    names = ["a", "b", "c", "d"]
    assert mixed_order(names) == sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


@given(st.integers(1, 300), st.data())
def test_deal_gives_every_row_once(rows: int, data) -> None:
    parts = data.draw(st.integers(1, rows))
    dealt = deal(rows, parts)
    assert sorted(np.concatenate(dealt)) == list(range(rows))
    sizes = [len(part) for part in dealt]
    assert max(sizes) - min(sizes) <= 1
    again = deal(rows, parts)
    assert all((one == other).all() for one, other in zip(dealt, again, strict=True))


def test_deal_shuffles() -> None:
    assert not (np.diff(deal(1000, 10)[0]) == 10).all()


@pytest.mark.parametrize("parts", [0, -1, 11])
def test_deal_refuses_a_share_of_nothing(parts: int) -> None:
    with pytest.raises(CoterieError, match=f"between 1 and 10 parts .*found {parts}"):
        deal(10, parts)


def test_names_have_equal_length() -> None:
    assert numbered("turned", 3, 20) == "turned-04"
    assert numbered("turned", 3, 200) == "turned-004"


def test_partition_must_be_known() -> None:
    assert choose_partition(None, ("zip",), "hospital") is None
    with pytest.raises(CoterieError, match="for hospital to be one of provider, zip, found 'writer'"):
        choose_partition("writer", ("provider", "zip"), "hospital")
