"""Token memories: which tokens followed contexts like this one?"""
