"""What mkdocs calls: the pages of pages.py in place of the files of this folder, and the menu."""

from typing import Any

from mkdocs.structure.files import File
from pages import navigation, pages

PAGES = pages()


def on_config(config: Any) -> Any:
    config.nav = navigation(PAGES)
    return config


def on_files(files: Any, config: Any) -> Any:
    for path, text in PAGES.items():
        if (there := files.get_file_from_path(path)) is not None:
            files.remove(there)
        files.append(File.generated(config, path, content=text))
    return files
