"""Keys of the section: unknown ones are errors, and a window decides what no other key says."""

import pytest

from ds_sp_overlap import SpOverlapConfig


@pytest.mark.parametrize("key", ["scop", "Scope", "memory_", "token_chunks", "memory", "sm_carveout"])
def test_a_key_that_is_none_is_refused(key):
    with pytest.raises(ValueError, match=f"^sp_overlap.{key}: unknown key"):
        SpOverlapConfig.parse({key: "block"})


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
