# Sets `result` to the version that a header defines as PREFIX_MAJOR, PREFIX_MINOR and PREFIX_PATCH.
function(jax_ep_read_version header prefix result)
  file(STRINGS "${header}" numbers REGEX "define ${prefix}_(MAJOR|MINOR|PATCH) ")
  string(REGEX MATCHALL "[0-9]+" numbers "${numbers}")
  list(JOIN numbers "." version)
  set(${result} "${version}" PARENT_SCOPE)
endfunction()
