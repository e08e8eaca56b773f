"""More models, by configurations of base size: those of timm and transformers that `networks.NETWORKS` has not.

What was made while looking at a few models is measured on these, which no one had in mind.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .networks import NETWORKS, NO_DROPOUT, TINY, Network, build_timm, build_transformers, draw_normal, draw_tokens

_TIMM = """
    swin_tiny_patch4_window7_224 efficientnet_b0 deit3_small_patch16_224 beit_base_patch16_224 maxvit_tiny_tf_224
    regnety_032 densenet121 mobilenetv3_large_100 convnextv2_tiny poolformerv2_s12 mobilevit_s edgenext_small levit_256
    cait_xxs24_224 gmlp_s16_224 resmlp_24_224 davit_tiny focalnet_tiny_srf vgg16_bn coatnet_0_rw_224
    xcit_small_12_p16_224 eva02_small_patch14_224 repvit_m1 nfnet_f0
"""
_IMAGES = partial(draw_normal, "x", (3, 224, 224), (3, 224, 224), 1000)
_PIXELS = partial(draw_normal, "pixel_values", (3, 224, 224), (3, 224, 224), 0)
_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 12}
_DECODER = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16}
_DECODER |= {"num_key_value_heads": 4, "vocab_size": 32000, "use_cache": False}


def _language(name: str, rows: int, tokens: int, tiny: dict[str, Any], **settings: Any) -> Network:
    """Describe a language model of transformers, whose loss is of the next tokens."""
    return Network(
        partial(build_transformers, f"{name}ForCausalLM", f"{name}Config", tiny, **settings),
        partial(draw_tokens, settings["vocab_size"], tokens, True), (1, rows),
        f"{name}, a language model, {tokens} tokens", "logits",
    )  # fmt: skip


def _decoder(name: str, rows: int = 4, tokens: int = 512, **changed: Any) -> Network:
    """Describe a language model of six layers of 1024."""
    tiny = {**TINY, "num_key_value_heads": 1, **({"head_dim": 16} if "head_dim" in changed else {})}
    return _language(name, rows, tokens, tiny, **{**_DECODER, **changed})


def _older(name: str, tiny: dict[str, Any], **settings: Any) -> Network:
    """Describe a language model of six layers of 768, whose configuration has names of its own."""
    return _language(name, 8, 256, tiny, vocab_size=32000, use_cache=False, **settings)


def _classifier(name: str, rows: int = 32, **changed: Any) -> Network:
    """Describe a model that classifies sequences of 128 tokens, of six layers of 768."""
    settings = {**_BASE, **NO_DROPOUT, "vocab_size": 30000, "num_labels": 2, **changed}
    return Network(
        partial(build_transformers, f"{name}ForSequenceClassification", f"{name}Config", TINY, **settings),
        partial(draw_tokens, settings["vocab_size"], 128, 2), (1, rows),
        f"{name}, sequence classification, 128 tokens", "logits",
    )  # fmt: skip


def _vision(name: str, **settings: Any) -> Network:
    """Describe a model of images, six layers of 768."""
    tiny = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Network(
        partial(build_transformers, name, f"{name.removesuffix('Model')}Config", tiny, **settings),
        _PIXELS, (1, 32), f"{name}, 224 x 224 pixels", "last_hidden_state",
    )  # fmt: skip


MORE_NETWORKS: dict[str, Network] = {
    **{
        name: Network(partial(build_timm, name, {}), _IMAGES, (1, 32), f"{name}, 224 x 224 pixels (timm)")
        for name in _TIMM.split()
    },
    "qwen2": _decoder("Qwen2"),
    "mistral": _decoder("Mistral"),
    "gemma2": _decoder("Gemma2", head_dim=64),
    "qwen3": _decoder("Qwen3", head_dim=64),
    "phi": _decoder("Phi", num_key_value_heads=16),
    "olmo2": _decoder("Olmo2"),
    "starcoder2": _decoder("Starcoder2"),
    "mixtral": _decoder(
        "Mixtral", rows=2, tokens=256, num_local_experts=4, num_hidden_layers=3,
        experts_implementation="eager",  # the others do not multiply float64
    ),
    "opt": _older(
        "OPT", {**TINY, "word_embed_proj_dim": 32, "ffn_dim": 48}, hidden_size=768, ffn_dim=3072,
        num_hidden_layers=6, num_attention_heads=12, word_embed_proj_dim=768, dropout=0.0,
    ),
    "bloom": _older(
        "Bloom", {"vocab_size": 101, "hidden_size": 32, "n_head": 2, "num_hidden_layers": 1},
        hidden_size=768, n_head=12, num_hidden_layers=6,
    ),
    "falcon": _older("Falcon", TINY, hidden_size=768, num_attention_heads=12, num_hidden_layers=6),
    "gpt_neox": _older("GPTNeoX", TINY, **_BASE),
    "electra": _classifier("Electra"),
    "albert": _classifier("Albert", classifier_dropout_prob=0.0),
    "deberta": _classifier(
        "DebertaV2", rows=16, relative_attention=True, position_buckets=64, pos_att_type=["p2c", "c2p"]
    ),
    "mpnet": _classifier("MPNet"),
    "modernbert": _classifier(
        "ModernBert", vocab_size=50368, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    ),
    "bart": Network(
        partial(
            build_transformers, "BartModel", "BartConfig",
            {"vocab_size": 101, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48,
             "decoder_ffn_dim": 48, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
            d_model=768, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
            encoder_attention_heads=12, decoder_attention_heads=12, dropout=0.0, use_cache=False,
        ),
        partial(draw_tokens, 50265, 128, False), (1, 16), "BART, 3 + 3 layers of 768, 128 tokens", "last_hidden_state",
    ),
    "clip": _vision("CLIPVisionModel", **_BASE),
    "siglip": _vision("SiglipVisionModel", **_BASE),
    "dinov2": _vision("Dinov2Model", hidden_size=768, num_hidden_layers=6, num_attention_heads=12, mlp_ratio=4),
    "segformer": Network(
        partial(
            build_transformers, "SegformerForSemanticSegmentation", "SegformerConfig",
            {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16,
             "num_attention_heads": [1, 1, 2, 2]},
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
        ),
        partial(draw_normal, "pixel_values", (3, 256, 256), (3, 64, 64), 0), (1, 8),
        "SegFormer-b0, 256 x 256 pixels", "logits",
    ),
    "wav2vec2": Network(
        partial(
            build_transformers, "Wav2Vec2Model", "Wav2Vec2Config",
            {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
             "conv_dim": (16,) * 7, "num_conv_pos_embedding_groups": 4},
            **_BASE, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
            layerdrop=0.0, apply_spec_augment=False,
        ),
        partial(draw_normal, "input_values", (64000,), (2000,), 0), (1, 4), "wav2vec 2.0, 4 s", "last_hidden_state",
    ),
    "xlnet": Network(
        partial(
            build_transformers, "XLNetForSequenceClassification", "XLNetConfig",
            {"vocab_size": 101, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 48},
            d_model=768, n_layer=6, n_head=12, d_inner=3072, dropout=0.0, summary_last_dropout=0.0, num_labels=2,
        ),
        partial(draw_tokens, 32000, 128, 2), (1, 16), "XLNet, 6 layers of 768, 128 tokens", "logits",
    ),
}  # fmt: skip
ALL_NETWORKS = {**NETWORKS, **MORE_NETWORKS}
