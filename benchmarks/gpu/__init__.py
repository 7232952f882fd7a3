"""The executor on a GPU, cell by cell: rates, steps, ceilings, whole runs. One JSON file a cell.

    python -m benchmarks.gpu --plan first --hardware profiles/MACHINE.toml --out benchmarks/results/MACHINE --minutes 8
    python -m benchmarks.gpu --cells rates,run:herald:32768:80,ceiling:full_kv_fetch_per_step:32768:16 --minutes 4

A cell's name is its kind and its parameters, joined by colons; ``key=value`` parts change one thing of it::

    rates                                  raw rates of this machine
    pool:CONTEXT:BATCH                     reads of each layer of a host pool; behind a run of that size
    step:METHOD:CONTEXT:BATCH              one forward by part, and its roofline sum
    attention:CONTEXT:BATCH                the attention kernel under several launch shapes
    proxy:CONTEXT:BATCH                    what picks and fetches in a layer of step-fetch, by part and launch shape
    run:METHOD:CONTEXT:BATCH[:key=value]   a whole run; keys: T, blocks, budget, link, threads, exact, keys,
                                           gather, policy (two-batch-overlap), hbm
    sustained:METHOD:CONTEXT:BATCH         steps in a burst, under load and with rests; clock and power meanwhile
    replicas:METHOD:CONTEXT:BATCH[:gpus=2] as many processes at once, a GPU each; before that one of them alone
    ceiling:NAME:CONTEXT:BATCH[:link=..]   a ceiling of Fig. 5 by the paper's protocol, in a process of its own

Cells run in the order given: the plans put the most telling ones first. A cell whose file exists is not run again; one
whose estimate (from the simulator on ``--hardware``) does not fit into what is left of ``--minutes`` is passed over and
said so; a failing cell leaves its error in its file and the others go on. Weights are random and prompts synthetic.
Files are what ``python -m calibration reconcile --measured DIR`` reads.
"""
