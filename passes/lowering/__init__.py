"""From an annotated module to the programs that workers run."""
