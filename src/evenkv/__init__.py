"""evenkv: paged grouped-query decode attention that reads the KV cache at copy speed."""

__version__ = "0.1.0"
