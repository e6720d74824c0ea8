"""Measuring quality and speed on real tasks. Stands above the engine and uses its public interface."""
