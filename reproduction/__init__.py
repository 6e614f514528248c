"""REPRODUCTION.md of this repository: how closely the committed runs reproduce FedNTD's Table 1.

`python -m reproduction` writes the page and its pictures, `--check` verifies them.
"""
