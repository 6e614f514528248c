"""Options of runs that take a second."""

FEDERATION = (
    *("num_clients=8", "participation=0.5", "local.epochs=1", "min_size=2", "figures=false"),
    *("hardware=cpu", "hardware.engine=sequential", "hardware.threads=1", "tracker=none"),
)
# three steps a client
SMALL = (*FEDERATION, "model.channels=[4]", "model.hidden=[8]", "local.batch_size=60")
