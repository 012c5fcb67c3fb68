"""The repository as text: its folders, modules, pages and messages; nothing that runs a loader."""
