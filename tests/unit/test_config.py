"""Keys of earlier releases: accepted with any value, and one warning that says what to do instead; other unknown keys stay errors."""

import logging

import pytest

from ds_sp_overlap import SpOverlapConfig
from tests.harness.listening import listening

RETIRED = {  # values that asked for something, values that did not, and what the warning advises
    "scope": (["block", "auto", "everything", True, ["layer"]], [None, "layer"], ["leave it out"]),
    "token_chunks": ([4, 1, 2.5, "four", {}], [None, "auto"], ["leave it out"]),
    "memory": (["auto", "least", 3], [None], ['"window"', '"head_groups"', '"checkpointing": "keep"']),
    "sm_carveout": ([8, -1, "some"], [None, 0, "auto"], ["leave it out"]),
}


def parsed(section):
    with listening(logging.WARNING) as messages:
        return SpOverlapConfig.parse(section), messages


@pytest.mark.parametrize("key, value", [(key, value) for key, (asking, *_) in RETIRED.items() for value in asking], ids=str)
def test_a_retired_key_is_accepted_with_one_warning_that_says_what_to_do(key, value):
    with listening(logging.WARNING) as messages:
        configs = [SpOverlapConfig.parse({key: value, "head_groups": 2}) for _ in range(2)]
    assert [config.head_groups for config in configs] == [2, 2]
    (message,) = messages
    assert message.startswith(f"sp_overlap.{key} ") and all(words in message for words in RETIRED[key][2])
    if (key, value) != ("memory", "auto"):
        assert configs[0] == SpOverlapConfig(head_groups=2)


@pytest.mark.parametrize("key, value", [(key, value) for key, (_, idle, _) in RETIRED.items() for value in idle], ids=str)
def test_a_retired_key_that_asked_for_nothing_is_accepted_in_silence(key, value):
    assert parsed({key: value}) == (SpOverlapConfig(), [])


def test_each_retired_key_has_a_warning_of_its_own():
    config, messages = parsed({"scope": "block", "token_chunks": 4, "memory": "auto", "sm_carveout": 8})
    assert len(messages) == 4 and config.keeps_over_checkpoints


@pytest.mark.parametrize(
    "section, keeps",
    [
        ({"memory": "auto"}, True),
        ({"memory": "auto", "checkpointing": "recompute"}, False),
        ({"memory": "auto", "checkpointing": None}, True),
        ({"memory": "least"}, False),
        ({"memory": None}, False),
        ({}, False),
    ],
    ids=str,
)
def test_memory_auto_still_keeps_attention_over_checkpoints_unless_told_otherwise(section, keeps):
    assert parsed(section)[0].keeps_over_checkpoints == keeps


@pytest.mark.parametrize("key", ["scop", "Scope", "memory_", "token_chunk", "carveout", "chain"])
def test_a_key_that_never_was_one_is_refused_and_no_retired_key_is_offered(key):
    with pytest.raises(ValueError, match=f"^sp_overlap.{key}: unknown key") as refused:
        SpOverlapConfig.parse({key: "block"})
    assert not any(f" {retired}," in str(refused.value) or f"'{retired}'" in str(refused.value) for retired in RETIRED)


@pytest.mark.parametrize(
    "section, groups, tiles, keeps, times",
    [
        ({}, 2, None, False, True),
        ({"window": 1}, 8, "auto", True, False),
        ({"window": 2, "head_groups": 4}, 4, "auto", True, False),
        ({"window": 1, "head_groups": "auto"}, 2, "auto", True, True),
        ({"window": 1, "tiles": None}, 8, None, True, False),
        ({"window": 1, "tiles": 64}, 8, 64, True, False),
        ({"window": 1, "checkpointing": "recompute"}, 8, "auto", False, False),
        ({"window": None, "tiles": "auto"}, 2, "auto", False, True),
    ],
    ids=str,
)
def test_a_window_alone_decides_what_no_other_key_says(section, groups, tiles, keeps, times):
    config = SpOverlapConfig.parse(section)
    assert config.groups_for(64, 8, windowed=True) == groups and config.tiles == tiles
    assert config.keeps_where_possible == keeps and config.times_groups == times
    assert config.groups_for(64, 8) == (section.get("head_groups", 2) if section.get("head_groups") != "auto" else 2)


@pytest.mark.parametrize("tiles", [0, -1, "some", True, 2.5])
def test_tiles_are_a_number_of_tokens(tiles):
    with pytest.raises(ValueError, match='sp_overlap.tiles must be null, a whole number of at least 1, or "auto", got '):
        SpOverlapConfig.parse({"tiles": tiles})
