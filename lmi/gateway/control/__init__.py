"""SageMaker's control plane: models, configurations and endpoints whose containers are `lmi serve`
processes of this machine.
"""
