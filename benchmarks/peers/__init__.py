"""FedAvg on W1 in other simulators, written as their documentation recommends."""
