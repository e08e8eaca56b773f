"""Whole models by published configurations, with random weights: those of transformers and timm, and a plain one.

Nothing is downloaded: the models are built from their configuration classes. Dropout is off, so that every rival and
the float64 reference compute the same in training. Each has a tiny variant, to try a benchmark or a machine with.
The libraries, PyTorch among them, are imported when a model is built or fed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Network:
    """One model."""

    build: Callable[[bool], Any]  # builds the module, tiny or not
    inputs: Callable[[int, bool], dict[str, Any]]  # draws arguments for a batch; `labels` are for training
    batches: tuple[int, int]  # the small and the large one
    what: str  # the configuration, in words
    # The attribute of the returned object that is compared; empty where it is a tensor. A module with one takes
    # labels and computes its own loss.
    result: str = ""

    def output(self, returned: Any) -> Any:
        """Return the tensor that is compared."""
        return getattr(returned, self.result) if self.result else returned

    def loss(self, returned: Any, labels: Any) -> Any:
        """Return the model's own loss, or else cross-entropy with labels or the mean square, in float32 at least."""
        import torch

        own = getattr(returned, "loss", None)
        if own is not None:
            return own
        output = self.output(returned)
        if output.dtype != torch.float64:
            output = output.float()
        return output.square().mean() if labels is None else torch.nn.functional.cross_entropy(output, labels)


def draw_tokens(vocabulary: int, length: int, labels: bool | int, batch: int, tiny: bool) -> dict[str, Any]:
    """Draw tokens; labels are one a token (True), of that many classes, or none (False)."""
    import torch

    words, size = (101, (batch, 8)) if tiny else (vocabulary, (batch, length))
    found = {"input_ids": torch.randint(5, words, size)}
    if labels is True:
        found["labels"] = torch.randint(5, words, size)
    elif labels:
        found["labels"] = torch.randint(labels, (batch,))
    return found


def draw_normal(
    name: str, shape: tuple[int, ...], small: tuple[int, ...], classes: int, batch: int, tiny: bool
) -> dict[str, Any]:
    """Draw normal numbers under a name, with labels of some classes, or none (0)."""
    import torch

    found = {name: torch.randn(batch, *(small if tiny else shape))}
    return {**found, "labels": torch.randint(7 if tiny else classes, (batch,))} if classes else found


def build_transformers(model: str, config: str, small: dict[str, Any], tiny: bool, **settings: Any) -> Any:
    """Build a transformers model by its configuration class; `small` are the settings of a tiny one."""
    import transformers

    chosen = getattr(transformers, config)(**{**settings, **(small if tiny else {})})
    return getattr(transformers, model)(chosen)


def build_encoder(model: str, config: str, small: dict[str, Any], tiny: bool, **settings: Any) -> Any:
    """Build the encoder alone of a transformers model."""
    return build_transformers(model, config, small, tiny, **settings).get_encoder()


def build_timm(name: str, small: dict[str, Any], tiny: bool, **settings: Any) -> Any:
    """Build timm's model of that name.

    Matrices that begin as zeros, such as Mixer's classifier, are drawn, and statistics of batch norms: with variances
    of one, sums of 16 bits lie close to where rounding is a tie, always on one side of it.
    """
    import timm
    import torch

    model = timm.create_model(name, pretrained=False, **settings, **({"num_classes": 7, **small} if tiny else {}))
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.trunc_normal_(parameter, std=0.02)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def _build_mlp(tiny: bool) -> Any:
    """Build (Linear, BatchNorm, ReLU) four times, and a classifier."""
    from torch import nn

    width, classes = (32, 7) if tiny else (4096, 1000)
    layers = [(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*(module for layer in layers for module in layer), nn.Linear(width, classes))


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# By the names that the configurations of text models have in common.
TINY = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"intermediate_size": 48, "max_position_embeddings": 16}
_TINY_WHISPER = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
_TINY_WHISPER |= {"max_source_positions": 8, "num_mel_bins": 80}
IMAGES = partial(draw_normal, "x", (3, 224, 224), (3, 32, 32), 1000)

NETWORKS: dict[str, Network] = {
    "bert": Network(
        partial(build_transformers, "BertForSequenceClassification", "BertConfig", TINY, **NO_DROPOUT, num_labels=2),
        partial(draw_tokens, 30522, 128, 2), (1, 32), "BERT-base, sequence classification, 128 tokens", "logits",
    ),
    "gpt2": Network(
        partial(
            build_transformers, "GPT2LMHeadModel", "GPT2Config", TINY, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False,
        ),
        partial(draw_tokens, 50257, 256, True), (1, 8), "GPT-2 small, language model, 256 tokens", "logits",
    ),
    "llama": Network(
        partial(
            build_transformers, "LlamaForCausalLM", "LlamaConfig", {**TINY, "num_key_value_heads": 1},
            hidden_size=2048, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8,
            intermediate_size=5632, use_cache=False,
        ),
        partial(draw_tokens, 32000, 512, True), (1, 4),
        "Llama, 8 layers of 2048, language model, 512 tokens", "logits",
    ),
    "vit": Network(
        partial(build_timm, "vit_base_patch16_224", {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2}),
        IMAGES, (1, 64), "ViT-B/16, 224 x 224 pixels (timm)",
    ),
    "mixer": Network(
        partial(build_timm, "mixer_b16_224", {"img_size": 32}),
        IMAGES, (1, 64), "MLP-Mixer B/16, 224 x 224 pixels (timm)",
    ),
    "convnext": Network(
        partial(build_timm, "convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
        IMAGES, (1, 64), "ConvNeXt-tiny, 224 x 224 pixels (timm)",
    ),
    "resnet": Network(
        partial(
            build_timm, "resnet50", {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16), "stem_width": 8},
            zero_init_last=False,
        ),
        IMAGES, (1, 64), "ResNet-50, 224 x 224 pixels (timm)",
    ),
    "mlp": Network(
        _build_mlp, partial(draw_normal, "input", (4096,), (32,), 1000), (64, 4096),
        "4 x (Linear 4096, BatchNorm, ReLU), Linear 1000",
    ),
    "distilbert": Network(
        partial(
            build_transformers, "DistilBertForSequenceClassification", "DistilBertConfig", TINY, dropout=0.0,
            attention_dropout=0.0, seq_classif_dropout=0.0,
        ),
        partial(draw_tokens, 30522, 128, 2), (1, 32), "DistilBERT, sequence classification, 128 tokens", "logits",
    ),
    "t5": Network(
        partial(
            build_encoder, "T5Model", "T5Config", TINY, d_model=768, d_ff=3072, num_layers=12, num_decoder_layers=0,
            num_heads=12, dropout_rate=0.0, use_cache=False,
        ),
        partial(draw_tokens, 32128, 256, False), (1, 16), "encoder of T5-base, 256 tokens", "last_hidden_state",
    ),
    "whisper": Network(
        partial(
            build_encoder, "WhisperModel", "WhisperConfig", _TINY_WHISPER, d_model=512, encoder_layers=6,
            encoder_attention_heads=8, encoder_ffn_dim=2048, decoder_layers=0, decoder_attention_heads=8, dropout=0.0,
            use_cache=False,
        ),
        partial(draw_normal, "input_features", (80, 3000), (80, 16), 0), (1, 8), "encoder of Whisper-base, 30 s",
        "last_hidden_state",
    ),
    "roberta": Network(
        partial(build_transformers, "RobertaForMaskedLM", "RobertaConfig", TINY, **NO_DROPOUT),
        partial(draw_tokens, 50265, 128, True), (1, 16), "RoBERTa-base, masked language model, 128 tokens", "logits",
    ),
}  # fmt: skip
