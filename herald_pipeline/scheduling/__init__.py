"""Which rows do what next: admission, batch policy, and the program that both interpreters follow."""
