"""The public surface: a file for each function of `import gradwire`, which is where to import them from."""
