"""Default options of each kind of `fedexp-papers analyse`, for the command and for figures."""

from typing import Any

COMMON: dict[str, Any] = {
    "data": "test",
    "examples": 1000,
    "seed": 0,
    "device": "auto",
    "data_dir": None,
}
PLANE = {"directions": "random", "models": None, "points": 21, "span": None}
NOISE = {"strengths": None, "draws": 5, "scale": "absolute"}
OF_KIND: dict[str, dict[str, Any]] = {
    "loss_plane": {"round": None, "client": None} | PLANE,
    "noise": {"round": None, "client": None} | NOISE,
    "hessian": {"round": None, "client": None, "eigenvalues": 5, "tolerance": 1e-3},
    "hypersphere": {"round": [], "clients": 3},
    "tsne": {"round": [], "clients": 10, "perplexity": 30.0, "examples": 200, "others": []},
    "neurons": {"round": []},
}
