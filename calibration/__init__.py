"""Measure a machine, fit what cannot be measured, and put prediction beside measurement."""
