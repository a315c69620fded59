"""What all tests share: hypothesis without a clock, since CI's cores are shared."""

from hypothesis import settings

settings.register_profile("lmi", deadline=None)
settings.load_profile("lmi")
