"""Make REPRODUCTION.md, which shows how closely the committed runs reproduce FedNTD's Table 1.

`python -m reproduction` writes the page and its pictures. `--check` verifies that they are current.
"""
