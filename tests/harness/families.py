"""Makes a tiny model of each type of causal language model in transformers, with weights that let every term affect the results."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY, HEADS, HEAD_DIM, HIDDEN, WINDOW = 64, 4, 8, 32, 5

# Pairs of a size and the names that configs give it. Two heads share a KV head, and head_dim is not hidden / heads.
SIZES = [
    (VOCABULARY, "vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input"),
    (2, "num_key_value_heads num_kv_heads num_query_groups n_group num_expert_group num_experts_per_tok "
    "num_experts_per_token moe_topk moe_k top_k_experts topk_group n_groups linear_num_key_heads "
    "mamba_n_groups mamba_ngroups num_hidden_layers decoder_layers n_layer n_layers num_layers num_decoder_layers "
    "encoder_layers num_encoder_layers swa_num_key_value_heads"),
    (HEADS, "num_attention_heads decoder_attention_heads n_head n_heads num_heads num_decoder_attention_heads encoder_attention_heads "
    "num_encoder_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads "
    "linear_num_heads mamba_n_heads mamba_num_heads swa_num_attention_heads n_mamba_heads attention_heads index_n_heads "
    "indexer_n_heads"),
    (16, "head_dim kv_channels swa_head_dim index_head_dim indexer_head_dim"),
    (HIDDEN, "hidden_size d_model n_embd embedding_size word_embed_proj_dim emb_dim lru_width "
    "backbone_hidden_size embedding_dim dim_model_base"),
    (48, "intermediate_size decoder_ffn_dim ffn_dim n_inner ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size "
    "shared_intermediate_size expert_ffn_hidden_size intermediate_size_mlp encoder_ffn_dim dff dim_ff d_inner "
    "moe_shared_expert_intermediate_size prefix_dense_intermediate_size dense_intermediate_size shared_experts_intermediate_size"),
    (8, "qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim linear_key_head_dim linear_value_head_dim linear_head_dim dim_head "
    "mamba_d_head mamba_headdim mamba_head_dim mamba_d_state ssm_state_size state_size d_head "
    "hidden_size_per_layer_input laurel_rank attention_head_size index_topk"),
    (24, "q_lora_rank kv_lora_rank o_lora_rank"),
    (WINDOW, "sliding_window sliding_window_size window_size local_attention attention_window_size local_attention_window_len"),
    (128, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers"),
    (0, "pad_token_id bos_token_id eos_token_id decoder_start_token_id "),
    (True, "attention_bias use_qkv_bias qkv_bias use_sliding_window is_decoder use_qk_norm qk_layernorm attn_temperature_tuning"),
]  # fmt: skip
SIZES = {name: size for size, names in SIZES for name in names.split()}

# Further config arguments of some types. Without them, the model can't be built, or a special feature of the type has no effect.
# A nested dict holds the arguments of a nested config.
CHUNK = 12  # does not divide the 16 tokens of a local sequence, so a local sequence ends inside a chunk
MORE: dict[str, dict] = {
    "bamba": dict(mamba_n_heads=8, mamba_chunk_size=8, attn_layer_indices=[1]),
    "big_bird": dict(attention_type="original_full"),
    "bigbird_pegasus": dict(attention_type="original_full"),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0)),
    "deepseek_v4": dict(o_groups=2),
    "doge": dict(keep_window_size=8),
    "dory": dict(initializer_range=1.0),  # else attention weights are one-hot, and no fault changes them
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=8, mamba_chunk_size=8),
    "gemma3n_text": dict(num_kv_shared_layers=0, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
    "gemma4_unified_assistant": dict(num_kv_shared_layers=0),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granitemoehybrid": dict(mamba_n_heads=8, mamba_chunk_size=8, layer_types=["mamba", "attention"]),
    "helium": dict(head_dim=8),
    "internlm3": dict(bias=True, qkv_bias=True),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_hidden_layers=2),
    "llama4": dict(text_config=dict(attention_chunk_size=CHUNK, floor_scale=4, no_rope_layers=[1, 0])),
    "llama4_text": dict(attention_chunk_size=CHUNK, floor_scale=4, no_rope_layers=[1, 0]),
    "mamba2": dict(num_heads=8, head_dim=8, chunk_size=8),
    "minimax": dict(block_size=8),
    "modernbert-decoder": dict(global_attn_every_n_layers=2),
    "qwen2": dict(layer_types=["sliding_attention", "full_attention"]),
    "qwen2_moe": dict(layer_types=["sliding_attention", "full_attention"]),
    "qwen3": dict(layer_types=["sliding_attention", "full_attention"]),
    "qwen3_moe": dict(layer_types=["sliding_attention", "full_attention"]),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    "qwen4_exp": dict(text_config=dict(indexer_kv_heads=1, indexer_budget=8, indexer_compress_ratio=2)),
    "qwen4_exp_text": dict(indexer_kv_heads=1, indexer_budget=8, indexer_compress_ratio=2),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"]),
    "reformer": dict(axial_pos_embds_dim=(16, 16), axial_pos_shape=(4, 8)),
    "roc_bert": dict(pronunciation_vocab_size=32, shape_vocab_size=32),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={kind: dict(rope_type="default", rope_theta=1e4) for kind in ("sliding_attention", "full_attention")},
    ),
    "zamba": dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], n_mamba_heads=2),
    "zamba2": dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], n_mamba_heads=8),
    "xmod": dict(default_language="en_XX"),
    "zaya": dict(num_experts_per_tok=1),
}


def tiny_config(kind, **more):
    """Make a config of type ``kind`` with the tiny `SIZES` for the names that it has; ``more`` overrides sizes by name."""
    return _tiny(CONFIG_MAPPING[kind], {**MORE.get(kind, {}), **more})


def _tiny(config_class, more):
    try:
        default = config_class()
    except Exception:  # some configs have no defaults
        default = None
    known = {} if default is None else vars(default)
    given = {name: size for name, size in SIZES.items() if name in known}
    for name, value in known.items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            given[name] = 0.0
    lists = {name: known.get(name) for name in ("layer_types", "mlp_layer_types", "layers_block_type")}
    lists = {name: list(dict.fromkeys(each)) for name, each in lists.items() if isinstance(each, (list, tuple))}
    if lists:
        given["num_hidden_layers"] = most = max(2, *map(len, lists.values()))
        given |= {name: (each * most)[:most] for name, each in lists.items()}
    if "qk_nope_head_dim" in known:
        given.update(num_key_value_heads=HEADS, head_dim=8)  # latent attention: no grouped queries; head_dim is the rotary part
    more = dict(more)
    for name, value in known.items():
        if isinstance(value, PreTrainedConfig):
            given[name] = _tiny(type(value), more.pop(name, {}))
    return config_class(**{**given, **more})


LARGEST = 7_000_000  # limit of the number of parameters


def tiny_model(kind, **more):
    """Make a model in fp64 with the same random weights on every rank; norms and biases are random, too."""
    config = tiny_config(kind, **more)
    config._experts_implementation = "eager"  # the default implementation has no fp64
    with torch.device("meta"):
        try:
            config._attn_implementation = "sdpa"
            model = AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            config._attn_implementation = "eager"
            model = AutoModelForCausalLM.from_config(config)
    if (count := sum(p.numel() for p in model.parameters())) > LARGEST:
        raise MemoryError(f"{count} parameters with the sizes that are known here")
    torch.manual_seed(0)
    return draw(AutoModelForCausalLM.from_config(config, dtype=torch.float64))


def draw(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2:
                p.add_(0.3 * torch.randn_like(p))
            else:
                p.normal_(0, 1.4 / p.shape[-1] ** 0.5)
    return model


def _rope(config, **parameters):
    """Return rope_parameters of a config, with ``parameters`` added to each of its sets.

    Some configs have one set, others one set for each type of layer. None if there is no set, or if the only set is not of type
    "default".
    """
    given = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in given:
        return {**given, **parameters} if given["rope_type"] == "default" else None
    return {name: {**one, **parameters} for name, one in given.items() if isinstance(one, dict)} or None


def _longrope(config):
    given = getattr(config, "rope_parameters", None) or {}
    dims = vars(config).get("head_dim") or HIDDEN // HEADS
    half = int(dims * given.get("partial_rotary_factor", 1.0)) // 2
    return _rope(
        config, rope_type="longrope", factor=4.0, short_factor=[1.0] * half, long_factor=[2.0] * half,
        original_max_position_embeddings=FIRST,
    )  # fmt: skip


# Further configs of a type, as functions of the first config that return changes. `configs` drops changes of fields that the config
# lacks.
FIRST = 20  # sequence length before RoPE was scaled; between the lengths of the local and the global sequence
SCALED = dict(original_max_position_embeddings=16)
CONFIGS = {
    "one KV head": lambda config: dict(num_key_value_heads=1),
    "a KV head each": lambda config: dict(num_key_value_heads=HEADS),
    "tied embeddings": lambda config: dict(tie_word_embeddings=not vars(config).get("tie_word_embeddings")),
    "no biases": lambda config: dict(attention_bias=False),
    "no windows": lambda config: dict(sliding_window=None, use_sliding_window=False),
    "rope linear": lambda config: dict(rope_parameters=_rope(config, rope_type="linear", factor=2.0)),
    "rope dynamic": lambda config: dict(
        rope_parameters=_rope(config, rope_type="dynamic", factor=2.0), max_position_embeddings=FIRST),
    "rope yarn": lambda config: dict(rope_parameters=_rope(config, rope_type="yarn", factor=4.0, **SCALED)),
    "rope llama3": lambda config: dict(rope_parameters=_rope(
        config, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **SCALED)),
    "rope longrope": lambda config: dict(rope_parameters=_longrope(config), original_max_position_embeddings=FIRST),
    "rope partial": lambda config: dict(rope_parameters=_rope(config, partial_rotary_factor=0.5)),
}  # fmt: skip


def configs(kind):
    """Return for each name in `CONFIGS` the changes to the config of ``kind``; leave out names without a change."""
    config, found = tiny_config(kind), {}
    for name, of in CONFIGS.items():
        changes = {key: value for key, value in of(config).items() if key in vars(config) and getattr(config, key) != value}
        if name.startswith("rope") and changes.get("rope_parameters") is None:
            continue
        if changes:
            found[name] = changes
    return found
