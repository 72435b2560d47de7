"""Operations that compute: add, ask and generate."""
