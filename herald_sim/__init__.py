"""The simulator: prices a pipeline on a machine profile with simpy."""
