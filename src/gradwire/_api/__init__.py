"""The public surface, one file for each function and class of `import gradwire`. Import them from there."""
