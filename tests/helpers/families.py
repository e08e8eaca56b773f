"""Tiny models of common families: those of transformers from configurations, the others written out; random weights.

Every configuration turns dropout off, so that a model computes the same in training as its reference does, and caches
of keys and values, which are no results. Sizes are small, odd where the family allows it, and differ from each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

Tensor = torch.Tensor
VOCABULARY = 61


@dataclass(frozen=True)
class Family:
    """A way to make a model, and what to call it with.

    Attributes
    ----------
    build : callable
        Makes the model, with weights from PyTorch's generator.
    inputs : callable
        Makes the keyword arguments, from the same generator.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]


def tokens(batch: int = 2, length: int = 11, name: str = "input_ids") -> dict[str, Tensor]:
    return {name: torch.randint(3, VOCABULARY, (batch, length))}


def padded(batch: int = 2, length: int = 11) -> dict[str, Tensor]:
    """Tokens of which the last ones of the second sequence are masked."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1, length - 3 :] = 0
    return {**tokens(batch, length), "attention_mask": mask}


def labelled(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model computes its loss as well, of tokens drawn anew."""
    ids = next(v for k, v in inputs.items() if k.endswith("input_ids"))
    return {**inputs, "labels": torch.randint(3, VOCABULARY, ids.shape)}


def images(batch: int = 2, size: int = 16, name: str = "pixel_values") -> dict[str, Tensor]:
    return {name: torch.randn(batch, 3, size, size)}


# transformers -------------------------------------------------------------------------------------------------------


def pretrained(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """What builds a model of a class of transformers, from a class of configurations and what is not its default."""

    def build() -> nn.Module:
        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "max_position_embeddings": 32,
    "use_cache": False,
}
_VISION = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": 16,
    "patch_size": 4,
}


def _clip() -> nn.Module:
    text = {k: _ENCODER[k] for k in ("vocab_size", "hidden_size", "num_attention_heads")}
    text |= {"num_hidden_layers": 1, "intermediate_size": 40, "max_position_embeddings": 16}
    text |= {"bos_token_id": 1, "eos_token_id": VOCABULARY - 1}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=_VISION | {"num_hidden_layers": 1}, projection_dim=20
    )
    return transformers.CLIPModel(config)


def _pairs() -> dict[str, Tensor]:
    """Texts, each with its end, and as many images."""
    ids = tokens(3, 7)
    ids["input_ids"] = ids["input_ids"].clamp(max=VOCABULARY - 2)
    ids["input_ids"][:, -1] = VOCABULARY - 1
    return {**ids, **images(3)}


def _translation() -> dict[str, Tensor]:
    return {**labelled(tokens(2, 5)), **tokens(2, 11)}


def _speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 24), "labels": torch.randint(3, VOCABULARY, (2, 6))}


# Plain modules ------------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """One block of MLP-Mixer: an MLP over the patches, then one over the channels, each on a residual."""

    def __init__(self, patches: int, channels: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(channels), nn.LayerNorm(channels)])
        self.over_patches = nn.Sequential(nn.Linear(patches, 12), nn.GELU(), nn.Linear(12, patches))
        self.over_channels = nn.Sequential(nn.Linear(channels, 48), nn.GELU(), nn.Linear(48, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norms[1](x))


class Mixer(nn.Module):
    """MLP-Mixer over images of 16 by 16."""

    def __init__(self, channels: int = 20, patch: int = 4, classes: int = 7):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, patch, patch)
        self.blocks = nn.Sequential(*(Mixing((16 // patch) ** 2, channels) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class Perceptron(nn.Module):
    """Linear, BatchNorm, ReLU, twice; a classifier."""

    def __init__(self, *widths: int, classes: int = 7):
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    """A language model: embedding, two layers of LSTM, a product with the embedding's weight."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.cells = nn.LSTM(width, width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, _ = self.cells(self.embedding(input_ids))
        return (self.norm(x) @ self.embedding.weight.T).log_softmax(-1)


FAMILIES: dict[str, Family] = {
    "BERT": Family(pretrained("BertForMaskedLM", "BertConfig", **_ENCODER), lambda: labelled(padded())),
    "RoBERTa": Family(
        pretrained("RobertaForSequenceClassification", "RobertaConfig", **_ENCODER, num_labels=5), padded
    ),
    "DistilBERT": Family(
        pretrained(
            "DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=VOCABULARY, dim=24, n_layers=2,
            n_heads=3, hidden_dim=40, max_position_embeddings=32, dropout=0.0, attention_dropout=0.0,
            seq_classif_dropout=0.0,
        ),
        padded,
    ),
    "GPT-2": Family(
        pretrained(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=3, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2,
        ),
        lambda: labelled(tokens()),
    ),
    "OPT": Family(
        pretrained(
            "OPTForCausalLM", "OPTConfig", vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, ffn_dim=40,
            num_attention_heads=3, max_position_embeddings=32, word_embed_proj_dim=24, dropout=0.0, use_cache=False,
        ),
        padded,
    ),
    "Llama": Family(pretrained("LlamaForCausalLM", "LlamaConfig", **_DECODER), lambda: labelled(tokens())),
    "Mistral": Family(pretrained("MistralForCausalLM", "MistralConfig", **_DECODER, sliding_window=4), tokens),
    "Qwen3": Family(pretrained("Qwen3ForCausalLM", "Qwen3Config", **_DECODER, head_dim=8), padded),
    "Mixtral": Family(
        pretrained(
            "MixtralForCausalLM", "MixtralConfig", **_DECODER | {"num_hidden_layers": 1}, num_local_experts=4,
            num_experts_per_tok=2,
        ),
        tokens,
    ),
    "T5": Family(
        pretrained(
            "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=24, d_kv=8, d_ff=40, num_layers=1,
            num_heads=3, dropout_rate=0.0, use_cache=False, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
        ),
        _translation,
    ),
    "Whisper": Family(
        pretrained(
            "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCABULARY, d_model=24, encoder_layers=1,
            decoder_layers=1, encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=40, num_mel_bins=8,
            decoder_ffn_dim=40, max_source_positions=12, max_target_positions=16, dropout=0.0, use_cache=False,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        ),
        _speech,
    ),
    "Mamba": Family(
        pretrained(
            "MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=16, state_size=4, expand=2,
            num_hidden_layers=2, time_step_rank=3, use_cache=False,
        ),
        lambda: tokens(2, 5),
    ),
    "ViT": Family(
        pretrained(
            "ViTForImageClassification", "ViTConfig", **_VISION, num_labels=5, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        images,
    ),
    "CLIP": Family(_clip, _pairs),
    "ConvNeXt V2": Family(
        pretrained(
            "ConvNextV2ForImageClassification", "ConvNextV2Config", hidden_sizes=[8, 12], depths=[1, 1], num_stages=2,
            image_size=16, patch_size=2, num_labels=5,
        ),
        images,
    ),
    "ResNet": Family(
        pretrained(
            "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1],
            layer_type="basic", num_labels=5,
        ),
        lambda: images(3),
    ),
    "MLP-Mixer": Family(Mixer, lambda: images(name="images")),
    "MLP with BatchNorm": Family(lambda: Perceptron(24, 32, 18), lambda: {"x": torch.randn(9, 24)}),
    "LSTM": Family(Recurrent, tokens),
}  # fmt: skip


def spread(model: nn.Module) -> None:
    """Draw weights that keep values near size one, and biases that matter.

    As published configurations initialise them, attention over a few tokens is all but uniform and biases are zero, so
    that much of a model could be wrong and hardly change its result.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def tensors(result: Any) -> list[Tensor]:
    """The floating-point tensors of a model's result, in their order."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, Mapping):
        return [t for value in result.values() for t in tensors(value)]
    if isinstance(result, (tuple, list)):
        return [t for value in result for t in tensors(value)]
    return []
