"""Tests the keys of the sp_overlap section: refusals, defaults, and the settings that a window implies."""

import re

import pytest

from ds_sp_overlap import SpOverlapConfig

REFUSED = [
    (
        {"head_group": 2},
        "sp_overlap.head_group: unknown key; did you mean 'head_groups'? Valid keys: enabled, head_groups, "
        "shares, kv_once_per_node, window, checkpointing, tiles, projections, "
        "wgrad, kernels, transport, max_ctas, min_ctas, cga_cluster_size, on_unsupported, documents, policy, timeline, check, "
        "policy.warmup_steps, timeline.path, timeline.steps",
    ),
    ({"Wgrad": True}, "did you mean 'wgrad'?"),
    ({"warmup_steps": 8}, "'policy.warmup_steps'?"),
    ({"steps": [1, 2]}, "'timeline.steps'?"),
    ({"sp_size": 8}, "sp_size: unknown key. V"),
    ({"head_groups": 0}, "sp_overlap.head_groups: got 0; must be 'auto', or must be greater than or equal to 1"),
    ({"head_groups": True}, "sp_overlap.head_groups: got True; must be 'auto', or must be a valid integer"),
    ({"enabled": "yes"}, "sp_overlap.enabled: got 'yes'; must be a valid boolean"),
    ({"on_unsupported": "ignore"}, "sp_overlap.on_unsupported: got 'ignore'; must be 'warn' or 'error'"),
    ({"kernels": "triton"}, "sp_overlap.kernels: got 'triton'; must be 'auto', 'compiled' or 'torch'"),
    ({"policy": {"warmup_steps": 3}}, "sp_overlap.policy.warmup_steps: got 3; must be 0, or must be greater than or equal to 8"),
    ({"policy": {"warmup": 8}}, "sp_overlap.policy.warmup: unknown key; did you mean 'policy.warmup_steps'? Valid keys: enabled, "),
    ({"policy": 8}, "sp_overlap.policy: got 8; must be a valid dictionary or instance of PolicyConfig"),
    ({"timeline": {"steps": [1, 2]}}, "sp_overlap.timeline.path: got {'steps': [1, 2]}; Field required"),
    ({"timeline": {"path": 3}}, "sp_overlap.timeline.path: got 3; must be a valid string"),
    (
        {"timeline": {"path": "x", "steps": [5, 3]}},
        "sp_overlap.timeline.steps must be the first and the last step, such as [20, 22], got [5, 3]",
    ),
    (True, 'sp_overlap: expected a section such as {"enabled": true}, got True'),
    ({"max_ctas": 0}, "sp_overlap.max_ctas: got 0; must be 'auto', or must be greater than or equal to 1"),
    ({"cga_cluster_size": 9}, "sp_overlap.cga_cluster_size: got 9; must be 'auto', or must be less than or equal to 8"),
    ({"min_ctas": 8, "max_ctas": 4}, "sp_overlap.min_ctas must be at most sp_overlap.max_ctas, 4, got 8"),
    ({"min_ctas": 4, "transport": "c10d"}, 'sp_overlap.min_ctas: "transport": "c10d" has no communicator of its own'),
    *(({"tiles": tiles}, f"sp_overlap.tiles: got {tiles!r}; must be 'auto', or must be ") for tiles in (0, -1, "some", True, 2.5)),
    # Keys of earlier releases.
    *(({key: 1}, f"sp_overlap.{key}: unknown key") for key in ("Scope", "memory", "memory_", "token_chunks", "sm_carveout")),
]


@pytest.mark.parametrize("section, message", REFUSED, ids=lambda x: str(x)[:40])
def test_config_is_refused_with_the_key_the_value_and_what_would_do(section, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SpOverlapConfig.parse(section)


def test_every_fault_of_a_config_is_named():
    with pytest.raises(ValueError) as refused:
        SpOverlapConfig.parse({"wgard": True, "enabled": 3})
    assert "sp_overlap.wgard" in str(refused.value) and "sp_overlap.enabled" in str(refused.value)


def test_good_configs_are_read():
    config = SpOverlapConfig.parse({"head_groups": 2, "kernels": "torch", "transport": "c10d", "check": True})
    assert SpOverlapConfig.parse(config) is config
    assert (config.head_groups, config.check, config.enabled) == (2, True, True)
    assert SpOverlapConfig.parse({}) == SpOverlapConfig()
    with pytest.raises(ValueError):
        config.check = False


@pytest.mark.parametrize("unsaid", [None, "auto"])
def test_null_and_auto_are_the_default_of_every_key_that_has_one(unsaid):
    keys = dict.fromkeys(SpOverlapConfig.model_fields, unsaid) | {"tiles": None}
    assert SpOverlapConfig.parse(keys) == SpOverlapConfig()
    nested = {"policy": {"warmup_steps": unsaid}, "timeline": {"path": "x", "steps": unsaid}}
    assert SpOverlapConfig.parse(nested) == SpOverlapConfig.parse({"timeline": {"path": "x"}})


@pytest.mark.parametrize("heads,size,groups", [(8, 2, 2), (4, 2, 2), (2, 2, 1), (7, 4, 1), (32, 8, 2), (8, 1, 2), (1, 1, 1)])
def test_auto_is_two_groups_where_every_rank_has_two_heads(heads, size, groups):
    assert SpOverlapConfig().groups_for(heads, size) == groups


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
