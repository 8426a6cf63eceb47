"""Papers that recipes, passes and decoding rules implement; docs/references.md lists all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Paper:
    """A publication, or a part of it.

    Attributes:
        title: the title.
        arxiv: the id on arXiv, as "2601.23278"; "" for a system that is described elsewhere.
        where: section, equation or algorithm that is implemented; "" for the method as a whole.
    """

    title: str
    arxiv: str = ""
    where: str = ""

    def at(self, where: str) -> Paper:
        """The part of the paper at a section, equation or algorithm."""
        return replace(self, where=where)

    def __str__(self) -> str:
        source = f"{self.title}, arXiv {self.arxiv}" if self.arxiv else self.title
        return f"{source}, {self.where}" if self.where else source


OURS = (Paper("dgraph's own"),)
"""The papers of a recipe, pass or rule that is published nowhere else."""

FOCUS = Paper("FOCUS: DLLMs Know How to Tame Their Compute Bound", "2601.23278")
DYLLM = Paper(
    "DyLLM: Efficient Diffusion LLM Inference via Saliency-based Token Selection and Partial Attention", "2603.08026"
)
MASKKV = Paper("Mask Tokens as Prophet: Fine-Grained Cache Eviction for Efficient dLLM Inference", "2510.09309")
DLLM_SERVE = Paper(
    "Taming the Memory Footprint Crisis: System Design for Production Diffusion LLM Serving", "2512.17077"
)
FAST_DLLM = Paper(
    "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding", "2505.22618"
)
DKV_CACHE = Paper("dKV-Cache: The Cache for Diffusion Language Models", "2505.15781")
DLLM_CACHE = Paper("dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching", "2506.06295")
WINO = Paper("Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs", "2507.18578")
SPARSE_DLLM = Paper("Sparse-dLLM: Accelerating Diffusion LLMs with Dynamic Cache Eviction", "2508.02558")
DINFER = Paper("dInfer: An Efficient Inference Framework for Diffusion Language Models", "2510.08666")

SNAPKV = Paper("SnapKV: LLM Knows What You are Looking for Before Generation", "2404.14469")
PYRAMIDKV = Paper("PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", "2406.02069")
SQUEEZE = Paper(
    "SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal Budget", "2404.04793"
)
ADAKV = Paper(
    "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference", "2407.11550"
)
H2O = Paper("H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", "2306.14048")

LLADA = Paper("Large Language Diffusion Models", "2502.09992")
LLADA2 = Paper("LLaDA2.0: Scaling up Diffusion Language Models to 100B", "2512.15745")
LLADA21 = Paper("LLaDA2.1: Speeding Up Text Diffusion via Token Editing", "2602.08676")
LLADA22 = Paper("LLaDA2.2")
DREAM = Paper("Dream 7B: Diffusion Large Language Models", "2508.15487")
SDAR = Paper("SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation", "2510.06303")
FAST_DLLM_V2 = Paper("Fast-dLLM v2: Efficient Block-Diffusion LLM", "2509.26328")
NEMOTRON = Paper("Nemotron-Labs-Diffusion", "2607.05722")
ENTROPY_BOUNDED = Paper("Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking", "2505.24857")

GPTQ = Paper("GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", "2210.17323")
AWQ = Paper("AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", "2306.00978")
