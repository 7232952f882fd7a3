"""The subcommands of `herald-sim`, each a function whose parameters are its options; cli.py lists them."""
