"""DeepSeek-V4 and V4.1, every component twice: a readable PyTorch reference and a compiled fast path, held together bit for bit."""

__version__ = "0.1.0"
