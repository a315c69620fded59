"""Commands that ask a server through OpenAI's API: a talk in the terminal, and files of
requests.
"""
