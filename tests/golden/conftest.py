from tests.workers import forgotten

__all__ = ["forgotten"]
