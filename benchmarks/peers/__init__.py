"""W1 FedAvg in other simulators, written the way their documentation shows."""
