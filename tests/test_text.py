"""Texts: file layouts, vocabularies and vectors, and TextCNN with its reproducible dropout."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.func import functional_call, grad, vmap

from fedexp.core.errors import ConfigError
from fedexp.data.text import (
    PAD,
    UNK,
    DropoutKeys,
    TextDataset,
    UnlabelledTexts,
    encode,
    most_frequent,
)
from fedexp.data.types import TextShape
from fedexp.engine.base import ClientRuntime
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.vectorised.clients import ClientNetwork
from fedexp.models.textcnn import TextCNN, dropout_mask, max_over_windows
from fedexp.training.exchange import PublicSet
from toy_federation import composed, random

SMALL = TextCNN(filters=5, heights=(1, 3), hidden=4, dropout=0.25, dimension=3)


def dataset(data_dir: Path, **values: Any) -> TextDataset:
    defaults = {
        "name": "news",
        "length": 4,
        "max_words": 10,
        "vocabulary": None,
        "vectors": None,
        "classes": None,
    }
    defaults["layout"] = None
    return TextDataset(data_dir=str(data_dir), **{**defaults, **values})


def write(data_dir: Path, **files: str) -> Path:
    """Write files of the data set `news`; train_txt becomes train.txt."""
    folder = data_dir / "news"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(content, encoding="utf-8", newline="")
    return folder


def write_vocabulary(folder: Path, words: list[str], **arrays: np.ndarray) -> None:
    (folder / "vocab.json").write_text(
        json.dumps({word: k for k, word in enumerate(words)}), encoding="utf-8"
    )
    np.savez(folder / "vectors.npz", **arrays)


def decoded(data, x: torch.Tensor) -> list[str]:
    """Return encoded texts as strings, with _ for padding and ? for unknown characters."""
    marks = {PAD: "_", UNK: "?"}
    return [
        "".join(marks.get(data.vocabulary[k], data.vocabulary[k]) for k in row)
        for row in x.tolist()
    ]


def message_of(action) -> str:
    with pytest.raises(ConfigError) as error:
        action()
    return str(error.value)


TXT = {"train_txt": "北京新闻大\t1\n 京 \t0\n", "test_txt": "闻x\t0\n", "class_txt": "sport\ngame"}


# ---- layouts ----


def test_txt_files_with_class_numbers_are_read(tmp_path):
    """Also with byte order marks and blank lines."""
    write(tmp_path, **TXT)
    data = dataset(tmp_path).load()
    assert data.classes == ("sport", "game")
    assert decoded(data, data.x_train) == ["北京新闻", "京___"]  # cut, stripped, padded
    assert decoded(data, data.x_test) == ["闻?__"]
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([1, 0], [0])
    assert (data.x_train.dtype, data.y_train.dtype) == (torch.int32, torch.int64)
    assert data.shape == TextShape(4, 6, None)
    marked = {name: "\ufeff" + text.replace("\n", "\r\n\r\n") for name, text in TXT.items()}
    write(tmp_path / "marked", **marked)
    assert torch.equal(dataset(tmp_path / "marked").load().x_train, data.x_train)


@pytest.mark.parametrize(
    "content",
    [
        'title,body,label\n ab ,"c\nd",y\nc,,x\n',
        'id,Label,Content,Title\n7,y,"c\nd",ab\n8,x,,c\n',  # other names and another order
        'content,label\n"abc\nd",y\nc,x\n',
    ],
)
def test_csv_files_with_class_names_are_read(content, tmp_path):
    write(tmp_path, train_csv=content, test_csv=content)
    data = dataset(tmp_path, length=6).load()
    assert decoded(data, data.x_train) == ["abc\nd_", "c_____"]  # body directly after title
    assert data.classes == ("x", "y")
    assert data.y_test.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("labels", "listed", "classes", "numbers"),
    [
        ("1 0", None, ("0", "1"), [1, 0]),
        ("1 0", ("x", "y", "z"), ("x", "y", "z"), [1, 0]),
        ("nan -1", ("-1", "nan"), ("-1", "nan"), [1, 0]),
        ("10.0 2.0", None, ("2.0", "10.0"), [1, 0]),  # in the order of numbers
        ("y x", ("y", "x"), ("y", "x"), [0, 1]),
    ],
)
def test_labels_are_numbers_or_names_of_classes(labels, listed, classes, numbers, tmp_path):
    first, second = labels.split()
    content = f"body,label\na,{first}\nb,{second}\n"
    write(tmp_path, train_csv=content, test_csv=content)
    data = dataset(tmp_path, classes=listed).load()
    assert (data.classes, data.y_train.tolist()) == (classes, numbers)


def test_files_of_the_cfed_release_are_read(tmp_path):
    """The columns are 0, 1, 2, possibly after an index. Each task has separate files, and eval
    files are training data.
    """
    folder = write(tmp_path)
    for k in range(3):
        for split in ("train", "eval", "test"):
            content = f'0,1,2\n"{split[1]}\n","　b",{k}\n'
            (folder / f"news_{split}_classIL{k + 1}.csv").write_text(content, encoding="utf-8")
    data = dataset(tmp_path).load()
    assert decoded(data, data.x_train) == ["rb__"] * 3 + ["vb__"] * 3
    assert decoded(data, data.x_test) == ["?b__"] * 3
    assert data.y_train.tolist() == [0, 1, 2] * 2
    assert data.y_test.tolist() == [0, 1, 2]
    for split in ("train", "test"):
        (folder / f"news_{split}_domainIL.csv").write_text(",0,1,2\n5,b,,0\n", encoding="utf-8")
    assert len(dataset(tmp_path).load().x_train) == 6  # of classIL alone: the two overlap
    assert len(dataset(tmp_path, layout="class_il").load().x_train) == 6
    assert len(dataset(tmp_path, layout="domain_il").load().x_train) == 1
    with pytest.raises(ConfigError, match=r"news: has no texts with dataset\.layout=csv"):
        dataset(tmp_path, layout="csv").load()
    for path in folder.glob("*classIL*"):
        path.unlink()
    data = dataset(tmp_path).load()
    assert (decoded(data, data.x_train), data.classes) == (["b___"], ("0",))


def test_public_texts_have_dropout_keys_on_request(tmp_path):
    """Each text has a key, different for each use. TextCNN then gives different logits in training
    mode.
    """
    write(tmp_path, **TXT)
    data = dataset(tmp_path).load()
    module = SMALL.build(data.shape, 2)
    runtime = ClientRuntime(FunctionalNetwork(module, "fp32"), data, None, None, torch.float32)
    held, rng = PublicSet(runtime, torch.tensor([1, 0]), None), np.random.default_rng(0)
    plain, _ = held.take(np.array([0, 1]))
    first, second = (held.take(np.array([0, 1]), rng)[0] for _ in range(2))
    assert torch.equal(first[:, :-1], plain)
    assert len({*first[:, -1].tolist(), *second[:, -1].tolist()}) == 4
    module.train()
    assert not torch.equal(module(first).logits, module(plain).logits)


def test_surrogate_texts_have_no_labels_and_no_test_set(tmp_path):
    write(tmp_path, **TXT, other_csv="article,content,target\n京大x, ,0\n,北,zzz\n")
    like = dataset(tmp_path, length=2).load()
    surrogate = UnlabelledTexts(
        name="weibo",
        data_dir=str(tmp_path),
        file="news/other.csv",
        length=9,
        max_words=9,
        vocabulary=None,
        vectors=None,
    )
    data = surrogate.load(like)
    # 大 is beyond the two characters of the other set
    assert decoded(data, data.x_train) == ["京?", "北_"]
    assert data.y_train.tolist() == [-1, -1]
    assert (data.x_test.shape, len(data.y_test), data.classes) == ((0, 2), 0, ())
    assert surrogate.load().shape == TextShape(9, 6, None)
    for file in ("news/none.csv", "news/train.txt"):
        assert message_of(replace(surrogate, file=file).load).startswith(f"dataset.file={file}: ")


# ---- vocabulary and vectors ----


def test_vocabulary_has_the_most_frequent_characters(tmp_path):
    assert most_frequent(["bbac", "cd"], 3) == ("b", "c", "a")
    assert encode(["cab", ""], ("b", "c", UNK, PAD), 2).tolist() == [[1, 2], [3, 3]]
    write(tmp_path, train_txt="aab\t0\n", test_txt="cc\t0\n", class_txt="x\n")
    assert dataset(tmp_path, max_words=1).load().vocabulary == ("a", UNK, PAD)


def test_vocabulary_and_vectors_are_read_from_files(tmp_path):
    """<UNK> and <PAD> are added if they are missing: the mean of the vectors, and zeros."""
    folder = write(tmp_path, **TXT)
    vectors = np.arange(8.0).reshape(4, 2)
    write_vocabulary(folder, ["新", UNK, PAD, "京"], other=np.eye(3), embeddings=vectors)
    data = dataset(tmp_path, vocabulary="vocab.json", vectors="vectors.npz").load()
    assert data.vocabulary == ("新", UNK, PAD, "京")
    assert data.x_train.tolist() == [[1, 3, 0, 1], [3, 2, 2, 2]]
    assert data.vectors.dtype == torch.float32
    assert data.vectors.tolist() == vectors.tolist()
    write_vocabulary(folder, ["新", "京"], anything=np.array([[1.0, 2.0], [3.0, 6.0]]))
    data = dataset(tmp_path, vocabulary="vocab.json", vectors="vectors.npz").load()
    assert data.vocabulary == ("新", "京", UNK, PAD)
    assert data.vectors.tolist() == [[1, 2], [3, 6], [2, 4], [0, 0]]


# ---- bad input ----

NUMBERS = "must be a number from 0 to 1 or one of sport, game"
CSV = {name: None for name in TXT} | {"test_csv": "body,label\na,x\n"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({name: None for name in TXT}, "news: has no texts, and they cannot be downloaded"),
        ({"test_txt": None}, "news: contains train.txt, but test.txt is missing"),
        (
            {"train_txt": "a\t0\nbc 1\n"},
            "train.txt, line 2: must have a text, a tab and a class number",
        ),
        ({"train_txt": "a\t0\n\nb\t2\n"}, f"train.txt, line 3: the class '2' {NUMBERS}"),
        ({"train_txt": "a\t0\n\t1\n \t1"}, "line 2: has no text; this holds for 2 of the 3"),
        (
            CSV | {"train_csv": "body,label\na,x\nb,\nc,NaN\n"},
            "train.csv, line 3: has no label (empty or nan); this holds for 2 of the 3",
        ),
        (
            CSV | {"train_csv": "body,label\na,1\nb,-1\n"},
            "line 3: the label -1, of 1 training text",
        ),
        (
            CSV | {"train_csv": "body,label\na,x\nb,None\n"},
            "line 3: the label None, of 1 training texts, may be a class or mean that there is no",
        ),
        ({"class_txt": None, "train_txt": "a\t0\nb\t2\n"}, "class 1 has no training texts"),
        ({"class_txt": "a\na\n"}, "class.txt: must have one class name per line"),
        (
            {"class_txt": "1\n2\n", "train_txt": "a\t1\nb\t0\n"},
            "line 1: the label '1' may be the name of a class or the number of the class '2'",
        ),
        ({"test_txt": "\n \n"}, "test.txt: has no texts"),
        ({"vocab_json": None}, "vocab.json: cannot be read"),
        (CSV | {"train_csv": "text,label\na,0\n"}, "at least one of title, body, content, article"),
        (CSV | {"train_csv": "body,label,target\na,0,0\n"}, "and one of label, target"),
        (CSV | {"train_csv": 'body,label\n"a\nb",x\nc\n'}, "line 4: has 1 values, but must have 2"),
    ],
)
def test_wrong_text_files_are_named(files, message, tmp_path):
    write(tmp_path, **{name: text for name, text in (TXT | files).items() if text is not None})
    vocabulary = "vocab.json" if "vocab_json" in files else None
    text = message_of(dataset(tmp_path, vocabulary=vocabulary).load)
    assert text.startswith(str(tmp_path))
    assert message in text
    assert "\n" not in text


def test_vectors_must_fit_the_vocabulary(tmp_path):
    with pytest.raises(ConfigError, match=r"v\.npz: must be null unless dataset\.vocabulary"):
        dataset(tmp_path, vectors="v.npz")
    folder = write(tmp_path, **TXT)
    news = dataset(tmp_path, vocabulary="vocab.json", vectors="vectors.npz")
    write_vocabulary(folder, ["新", "京"], embeddings=np.ones((3, 2)))
    assert "vectors.npz: has 3 vectors, but" in message_of(news.load)
    (folder / "vectors.npz").unlink()
    assert "vectors.npz: this file is missing; set dataset.vectors=null" in message_of(news.load)


def test_long_articles_are_read(tmp_path):
    article = "body,label\n" + "长" * 200_000 + ",x\n"  # beyond csv's default limit
    write(tmp_path, train_csv=article, test_csv=article)
    assert dataset(tmp_path).load().vocabulary == ("长", UNK, PAD)


# ---- draws ----


def test_dropout_keys_become_the_last_column(tmp_path):
    write(tmp_path, **TXT)
    data = dataset(tmp_path).load()
    index = torch.tensor([[1, 0], [1, 1]])
    draws = torch.from_numpy(DropoutKeys().draw(np.random.default_rng(0), 4, 1, 2)).view(2, 2, 1)
    plain = data.inputs(data.x_train, index, None, None, torch.float32)
    assert torch.equal(plain, data.x_train[index].long())
    keyed = data.inputs(data.x_train, index, draws, None, torch.float32)
    assert torch.equal(keyed, torch.cat([plain, draws], -1))
    mapped = vmap(lambda i, d: data.inputs(data.x_train, i, d, None, torch.float32))(index, draws)
    assert torch.equal(mapped, keyed)


# ---- TextCNN ----


def textcnn(**changes: Any) -> TextCNN:
    node = OmegaConf.to_container(composed("model=textcnn").model)
    node = {key: value for key, value in node.items() if key != "_target_"}
    return TextCNN(**{**node, "heights": tuple(node["heights"]), **changes})


@pytest.mark.parametrize(
    ("words", "width", "classes", "count"),
    [
        (6615, 300, 9, 6615 * 300 + 769_777),  # CFeD's vocabulary and vectors
    ],
)
def test_textcnn_has_the_expected_number_of_parameters(words, width, classes, count):
    with torch.device("meta"):
        model = textcnn().build(TextShape(32, words, torch.empty(words, width)), classes)
    assert sum(p.numel() for p in model.parameters()) == count


def test_initial_embeddings_are_the_vectors():
    vectors = torch.randn(7, 6)
    assert torch.equal(textcnn().build(TextShape(5, 7, vectors), 3).embedding.weight, vectors)
    assert textcnn().build(TextShape(32, 10, None), 9).embedding.weight.shape == (10, 300)


def obvious(model, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute features and logits of one text, filter by filter and window by window."""
    vectors, outputs = model.embedding.weight[words], []
    for layer in model.convolutions:
        height = layer.weight.shape[2]
        for weight, bias in zip(layer.weight[:, 0], layer.bias, strict=True):
            values = [
                (weight * vectors[k : k + height]).sum() + bias
                for k in range(len(words) - height + 1)
            ]
            outputs.append(torch.stack(values).clamp(min=0).max())
    features = model.hidden.weight @ torch.stack(outputs) + model.hidden.bias
    return features, model.classifier.weight @ features + model.classifier.bias


def small_model(**changes: Any):
    """Return a model in float64 with nonzero biases."""
    torch.manual_seed(0)
    model = replace(SMALL, **changes).build(TextShape(6, 9, None), 3).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def test_textcnn_equals_loops():
    model = small_model().eval()
    x = torch.randint(9, (7, 6))
    out = model(x)
    expected = [
        torch.stack(rows) for rows in zip(*(obvious(model, words) for words in x), strict=True)
    ]
    torch.testing.assert_close(out.features, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.logits, expected[1], rtol=1e-12, atol=1e-12)
    loss, same = out.logits.logsumexp(1).sum(), expected[1].logsumexp(1).sum()
    parameters = list(model.parameters())
    for got, want in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(same, parameters), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_second_derivatives_of_maxima_equal_finite_differences():
    windows, weight, bias = random(5, 7, 6), random(11, 6, seed=1), random(11, seed=2)
    tensors = [each.requires_grad_() for each in (windows, weight, bias)]
    assert torch.autograd.gradgradcheck(max_over_windows, tensors)


def test_texts_shorter_than_a_filter_are_rejected():
    with pytest.raises(
        ConfigError,
        match=re.escape("model.heights=[2, 3, 4]: needs texts of at least 4 characters"),
    ):
        textcnn().build(TextShape(3, 10, None), 2)


# ---- dropout ----


def splitmix(key: int, unit: int) -> int:
    """Compute the hash in `kept` with Python's unbounded integers, from 0 to 2^64 - 1."""

    def finalise(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    return finalise((finalise(key % 2**64) + (unit + 1) * 0x9E3779B97F4A7C15) % 2**64)


def test_dropout_mask_equals_splitmix():
    # SplitMix64's first number from the state 0 (prng.di.unimi.it/splitmix64.c); the finaliser
    # leaves 0 unchanged.
    assert splitmix(0, 0) == 0xE220A8397B1DCDAF
    keys = [
        0,
        -1,
        2**63 - 1,
        -(2**63),
        *DropoutKeys().draw(np.random.default_rng(1), 20)[:, 0].tolist(),
    ]
    for p in (0.1, 0.5, 0.93):
        # A signed comparison against the threshold orders numbers as bits with the sign flipped do.
        expected = [
            [(splitmix(key, unit) + 2**63) % 2**64 >= round(p * 2**64) for unit in range(50)]
            for key in keys
        ]
        assert dropout_mask(torch.tensor(keys)[:, None], 50, p).tolist() == expected


def keyed(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.cat(
        [x, torch.from_numpy(DropoutKeys().draw(np.random.default_rng(seed), len(x)))], 1
    )


def test_dropout_scales_and_is_reproducible():
    model = small_model(filters=6).train()
    x = keyed(torch.randint(9, (5, 6)))
    maps = model._convolved(model.embedding(x[:, :6]))
    scaled = maps * dropout_mask(x[:, 6:], 12, 0.25) / 0.75
    out = model(x)
    torch.testing.assert_close(out.features, model.hidden(scaled), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.logits, model.classifier(out.features), rtol=1e-12, atol=1e-12)
    assert torch.equal(model(x).logits, out.logits)
    torch.testing.assert_close(model(x.flip(0)).logits, out.logits.flip(0), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(keyed(x[:, :6], seed=1)).logits, out.logits)


def test_no_dropout_in_evaluation_without_a_key_or_at_rate_zero():
    x = torch.randint(9, (5, 6))
    model = small_model().train()
    plain = model(x).logits
    assert not torch.equal(model(keyed(x)).logits, plain)
    assert torch.equal(model.eval()(x).logits, plain)
    assert torch.equal(model(keyed(x)).logits, plain)
    assert torch.equal(small_model(dropout=0.0).train()(keyed(x)).logits, plain)


@pytest.mark.parametrize("train", [True, False])
def test_vmap_equals_separate_clients(train):
    """Losses and gradients of three clients computed together equal those computed separately."""
    model = small_model().train(train)
    stacked = {k: torch.randn(3, *p.shape, dtype=p.dtype) for k, p in model.named_parameters()}
    x, y = (
        torch.stack([keyed(torch.randint(9, (4, 6)), seed) for seed in range(3)]),
        torch.randint(3, (3, 4)),
    )

    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x,)).logits, y)

    together = vmap(grad(loss))(stacked, x, y)
    for k in range(3):
        alone = grad(loss)({name: value[k] for name, value in stacked.items()}, x[k], y[k])
        for name, value in alone.items():
            torch.testing.assert_close(together[name][k], value, rtol=1e-11, atol=1e-12)


def test_vectorised_engine_uses_dropout_only_in_training():
    """The differentiated model runs in training mode with dropout keys; a teacher does not."""
    model, x = small_model(), keyed(torch.randint(9, (4, 6)), 1)
    params = {k: p.detach() for k, p in model.named_parameters()}
    trained, tested = (
        getattr(copy.deepcopy(model), mode)()(x).logits.sum() for mode in ("train", "eval")
    )
    net = ClientNetwork(FunctionalNetwork(model, "fp64"), {})
    _, value = net.gradient(
        lambda p: net(p, x).logits.sum() - 3 * net(params, x).logits.sum(), params
    )
    torch.testing.assert_close(value, (trained - 3 * tested).detach())
    assert abs(float(trained - tested)) > 1e-3
