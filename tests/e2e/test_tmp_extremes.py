import sys, traceback
import pytest
from fuzzing import *
from fuzzing import GROUPS, defaults_of, top_level, WORK, smaller
from test_fuzz import *
from fedexp.build import build
from fedexp.errors import ConfigError


def test_extremes(run_case):
    out = open("/tmp/extremes.txt", "a")
    seen = set()
    todo = []
    for group, option in [("", "")] + [(g, o) for g in GROUPS for o in list_options(g, [CONF]) if g != "tracker"]:
        keys = defaults_of(group, option) if group else top_level()
        target = keys.get(f"{group}._target_")
        for key, default in keys.items():
            if (target, key) in seen or key.endswith("_target_") or WORK.search(key):
                continue
            seen.add((target, key))
            if isinstance(default, bool):
                continue
            vals = (
                ["2147483648", "9223372036854775807", "1e308", "1e-300"]
                if not isinstance(default, list)
                else ["[2147483648]", "[1e308]", "[9223372036854775807,1,1]"]
            )
            for v in vals:
                todo.append((group, option, key, v))
    print(len(todo), file=out, flush=True)
    for group, option, key, v in todo:
        o = [f"{group}={option}"] if group else []
        if option == "file":
            continue
        try:
            build(composed(*o, f"{key}={v}"))
        except ConfigError:
            continue
        except Exception as e:
            print("COMPOSE", group, option, key, v, type(e).__name__, str(e)[:300], file=out, flush=True)
        chosen = {group: option} if group else {}
        more = [
            "rounds=1",
            "num_clients=4",
            "participation=0.5",
            "local.epochs=1",
            "figures=false",
            "hardware.threads=1",
            "hardware.device=cpu",
            "hardware.engine=sequential",
            "tracker=none",
        ]
        if group == "model" and option.startswith("resnet"):
            more += ["dataset=image_folder", "dataset.root=images", "min_size=1"]
        if option == "textcnn":
            more += [
                "dataset=thucnews",
                "data_dir=texts",
                "dataset.vocabulary=null",
                "dataset.vectors=null",
                "min_size=1",
            ]
        if group == "dataset":
            if option == "image_folder":
                more += ["dataset.root=images", "min_size=1"]
            elif option == "thucnews":
                more += [
                    "model=textcnn",
                    "data_dir=texts",
                    "dataset.vocabulary=null",
                    "dataset.vectors=null",
                    "min_size=1",
                ]
            elif option != "digits":
                continue
        if group == "algorithm":
            sc = find_class(str(defaults_of(group, option)["algorithm._target_"]), "").scenarios
            if "none" not in sc:
                more += [f"scenario={sc[0]}"]
            more += ["public.fraction=0.1", "surrogate.fraction=0.2"]
            if option == "fedalign":
                more += ["model=resnet56_bottleneck", "dataset=image_folder", "dataset.root=images", "min_size=1"]
        if group == "partition":
            more = [m for m in more if "min_size" not in m]
        case = Case((*[f"{g}={o}" for g, o in chosen.items()], *more, *smaller(chosen), f"{key}={v}"))
        try:
            r = run_case(case)
        except BaseException as e:
            print("BAD", " ".join(case.arguments), type(e).__name__, str(e)[:1500], file=out, flush=True)
        else:
            print(r, " ".join(case.arguments), file=out, flush=True)
    print("END", file=out, flush=True)
