# cuda.cmake - finds nvcc, the headers of CUDA, cuBLASLt and cuDNN, and NCCL, and prints a line with
# their versions, or a warning. CMakeLists.txt includes it; tools/setup runs it with `cmake -P`.
#
# Each is searched for by itself, because NVIDIA's apt packages, Python's wheels, conda and
# environment modules put them into different folders. CMake's FindCUDAToolkit expects one folder.
#
# NVCC, CUBLASLT_HEADERS, CUDA_HEADERS, CUDNN_HEADERS and NCCL_LIBRARY are cache variables, because
# the next configuration may run without the environment. Also set:
#   NVCC_FLAGS, NVCC_LINK  options of nvcc for compiling and linking
#   CUDA_MAJOR             the major version of CUDA, of nvcc or else of cublasLt.h
#   HAVE_CUDNN             whether all headers were found
#   CUDA_INCLUDES          their folders
#   CUBLASLT_SONAME        the name of the library that fits
cmake_minimum_required(VERSION 3.25)

# ==== Versions ====

# Sets a variable to the number that a header defines as NAME. Empty: it does not.
function(read_define result header name)
  set(line)
  if(EXISTS ${header})
    file(STRINGS ${header} line LIMIT_COUNT 1 REGEX "^#define +${name} +[0-9]+")
  endif()
  string(REGEX REPLACE "^[^ ]+ +[^ ]+ +([0-9]*).*" "\\1" number "${line}")
  set(${result} "${number}" PARENT_SCOPE)
endfunction()

# Sets a variable to MAJOR.MINOR, from the numbers that a header defines as PREFIX_MAJOR and _MINOR.
function(read_version result header prefix)
  read_define(major ${header} ${prefix}_MAJOR)
  read_define(minor ${header} ${prefix}_MINOR)
  set(${result} ${major}.${minor} PARENT_SCOPE)
endfunction()

function(read_nvcc_version result nvcc)
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+[.][0-9]+)" text "${text}")
  set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

# Reads it from the name of the file, or from the header beside it.
function(read_nccl_version result library)
  file(REAL_PATH ${library} real)
  if(real MATCHES "[.]so[.]([0-9]+[.][0-9]+)")
    set(${result} ${CMAKE_MATCH_1} PARENT_SCOPE)
  else()
    cmake_path(GET library PARENT_PATH folder)
    read_version(version ${folder}/../include/nccl.h NCCL)
    set(${result} ${version} PARENT_SCOPE)
  endif()
endfunction()

# Sets a variable to the major version of CUDA that the cuDNN or NCCL in a folder is for. Their
# headers do not say. cuBLAS may be beside them, and a wheel has it in its name. Empty: unknown.
function(read_cuda_of result path)
  read_define(major ${path}/cublas_api.h CUBLAS_VER_MAJOR)
  if(path MATCHES "^(.*)/nvidia/(cudnn|nccl)/")
    file(GLOB wheels ${CMAKE_MATCH_1}/nvidia_${CMAKE_MATCH_2}_cu*.dist-info)
    string(REGEX REPLACE ".*_cu([0-9]+)-[^/]*$" "\\1" major "${wheels}")
  endif()
  set(${result} "${major}" PARENT_SCOPE)
endfunction()

# ==== Checks: a search skips what does not fit, and continues ====

# A check calls this to reject the candidate. The warning will show the reason.
macro(skip why)
  set(${result} FALSE PARENT_SCOPE)
  string(REGEX REPLACE "/$" "" path ${path})
  set_property(GLOBAL APPEND PROPERTY CUDA_SKIPPED "${path} (${why})")
endmacro()

function(check_nvcc result path)
  read_nvcc_version(version ${path})
  if(version VERSION_LESS 12)
    skip("CUDA ${version}")
  endif()
endfunction()

function(check_cublaslt result path)
  read_define(major ${path}/cublas_api.h CUBLAS_VER_MAJOR)
  if(CUDA_MAJOR AND NOT major EQUAL CUDA_MAJOR OR NOT major GREATER_EQUAL 12)
    skip("cuBLAS ${major}")
  endif()
endfunction()

function(check_cuda result path)
  read_define(version ${path}/cuda_runtime_api.h CUDART_VERSION)
  if(NOT version MATCHES "^${CUDA_MAJOR}...$")
    skip("CUDART_VERSION ${version}")
  endif()
endfunction()

function(check_cudnn result path)
  read_version(version ${path}/cudnn_version.h CUDNN)
  read_cuda_of(major ${path})
  if(NOT version VERSION_GREATER_EQUAL 9.8) # LT_CUDNN_OLDEST
    skip("cuDNN ${version}")
  elseif(major AND NOT major EQUAL CUDA_MAJOR)
    skip("cuDNN for CUDA ${major}")
  endif()
endfunction()

function(check_nccl result path)
  read_nccl_version(version ${path})
  read_cuda_of(major ${path})
  if(NOT version VERSION_GREATER_EQUAL 2.18 OR (major AND NOT major EQUAL CUDA_MAJOR))
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

# ==== Folders that contain include, lib or bin, in the order of the search ====

# Appends the nvidia packages of Python installations to a list.
macro(append_wheels list)
  foreach(root ${ARGN})
    file(GLOB found ${root}/lib/python3*/site-packages/nvidia/*
      ${root}/lib/python3*/dist-packages/nvidia/*)
    list(SORT found COMPARE NATURAL ORDER DESCENDING) # Python 3.10 before 3.9
    list(APPEND ${list} ${found})
  endforeach()
endmacro()

set(toolkits ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH})
string(REPLACE ":" ";" include_path "$ENV{CPATH}") # environment modules set it
string(REPLACE ":" ";" library_path "$ENV{LD_LIBRARY_PATH}")
cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH root)
set(active)
append_wheels(active ${root}/.deps/cuda $ENV{VIRTUAL_ENV}) # the first is made by tools/setup
list(APPEND active $ENV{CONDA_PREFIX})

# Other installations of Python, the same as at run time: see ops/cuda/find_library.h.
set(others /usr/local/cuda)
set(pythons)
find_program(python python3 NO_CACHE)
if(python)
  file(REAL_PATH ${python} real)
  foreach(file ${python} ${real})
    string(REGEX REPLACE "/[^/]*/[^/]*$" "" prefix ${file})
    list(APPEND pythons ${prefix})
  endforeach()
endif()
append_wheels(others ${pythons} $ENV{HOME}/.local /usr/local /usr)

# ==== The search ====

if(CMAKE_SCRIPT_MODE_FILE) # no platform is loaded
  set(LT_CUDA ON)
  if(NOT CMAKE_SYSTEM_PREFIX_PATH)
    set(CMAKE_SYSTEM_PREFIX_PATH /usr/local /usr)
  endif()
endif()
set(CUDA_MAJOR "")
set(toolkit)
if(LT_CUDA)
  find_program(NVCC nvcc VALIDATOR check_nvcc HINTS ${toolkits} PATHS ${active} ${others}
    PATH_SUFFIXES bin)
endif()
if(LT_CUDA AND NVCC)
  read_nvcc_version(NVCC_VERSION ${NVCC})
  if(NOT NVCC_VERSION VERSION_GREATER_EQUAL 12)
    message(FATAL_ERROR "${NVCC} is not the nvcc of CUDA 12.0 or later. The option -UNVCC searches "
      "again.")
  endif()
  string(REGEX MATCH "^[0-9]+" CUDA_MAJOR ${NVCC_VERSION})
  # nvcc may be a link or a script. It prints the folder of its toolkit.
  execute_process(COMMAND ${NVCC} -v -dryrun x.cu ERROR_VARIABLE text OUTPUT_QUIET)
  if(text MATCHES "#[$] TOP=([^\r\n]+)")
    cmake_path(SET toolkit NORMALIZE ${CMAKE_MATCH_1})
    file(REAL_PATH ${toolkit} toolkit)
  endif()
endif()

set(first ${CUDNN_ROOT} $ENV{CUDNN_ROOT} ${toolkit} ${toolkits} ${include_path} ${active})
macro(recheck variable check) # a cached file may have changed or gone
  set(fits TRUE)
  if(${variable})
    cmake_language(CALL ${check} fits ${${variable}})
  endif()
  if(NOT fits)
    unset(${variable} CACHE)
  endif()
endmacro()
macro(find_headers variable header check)
  recheck(${variable} ${check})
  find_path(${variable} ${header} VALIDATOR ${check} HINTS ${first} PATHS ${others}
    PATH_SUFFIXES include targets/x86_64-linux/include targets/sbsa-linux/include)
endmacro()
find_headers(CUBLASLT_HEADERS cublasLt.h check_cublaslt)
if(CUBLASLT_HEADERS AND NOT CUDA_MAJOR)
  read_define(CUDA_MAJOR ${CUBLASLT_HEADERS}/cublas_api.h CUBLAS_VER_MAJOR)
endif()
if(CUDA_MAJOR)
  find_headers(CUDA_HEADERS cuda_runtime_api.h check_cuda)
  find_headers(CUDNN_HEADERS cudnn.h check_cudnn)
  recheck(NCCL_LIBRARY check_nccl)
  find_library(NCCL_LIBRARY libnccl.so.2 VALIDATOR check_nccl HINTS ${library_path} ${first}
    PATHS ${others} PATH_SUFFIXES lib64 lib lib/x86_64-linux-gnu lib/aarch64-linux-gnu
    targets/x86_64-linux/lib targets/sbsa-linux/lib)
endif()

# The libraries are opened at run time. The linker records their folders in the plugin, so that the
# loader finds those that are beside the headers.
set(rpath)
set(CUBLASLT_SONAME libcublasLt.so.${CUDA_MAJOR})
set(CUDNN_SONAME libcudnn.so.9)
foreach(name CUBLASLT CUDNN)
  if(${name}_HEADERS)
    find_library(${name}_LIBRARY ${${name}_SONAME} HINTS ${${name}_HEADERS}/..
      PATH_SUFFIXES lib64 lib NO_CACHE NO_DEFAULT_PATH)
  endif()
endforeach()
foreach(library ${CUBLASLT_LIBRARY} ${CUDNN_LIBRARY} ${NCCL_LIBRARY})
  if(library)
    cmake_path(GET library PARENT_PATH folder)
    file(REAL_PATH ${folder} folder)
    list(APPEND rpath ${folder})
  endif()
endforeach()
list(REMOVE_ITEM rpath ${CMAKE_C_IMPLICIT_LINK_DIRECTORIES})
list(REMOVE_DUPLICATES rpath)

set(NVCC_FLAGS)
if(NVCC_VERSION VERSION_GREATER_EQUAL 12.8)
  set(NVCC_FLAGS --compress-mode=size)
endif()
set(NVCC_LINK)
if(toolkit) # nvcc itself searches lib64, but wheels have lib
  set(NVCC_LINK -L${toolkit}/lib)
endif()
if(rpath)
  list(JOIN rpath : rpath)
  string(REPLACE " " "\\ " rpath "${rpath}") # nvcc passes this to a shell
  list(APPEND NVCC_LINK -Xlinker=--enable-new-dtags,-rpath,${rpath})
endif()

# ==== Report ====

set(missing)
if(NOT CUDNN_HEADERS)
  list(APPEND missing "cudnn.h of cuDNN 9.8 or later")
endif()
if(NOT CUBLASLT_HEADERS)
  list(APPEND missing "cublasLt.h of CUDA ${CUDA_MAJOR}")
endif()
if(NOT CUDA_HEADERS)
  list(APPEND missing "cuda_runtime_api.h of CUDA ${CUDA_MAJOR}")
endif()
set(HAVE_CUDNN ON)
set(CUDA_INCLUDES ${CUDNN_HEADERS} ${CUBLASLT_HEADERS} ${CUDA_HEADERS})
list(FILTER CUDA_INCLUDES EXCLUDE REGEX "-NOTFOUND$")
if(missing)
  set(HAVE_CUDNN OFF)
endif()
get_property(skipped GLOBAL PROPERTY CUDA_SKIPPED)
if(skipped)
  list(REMOVE_DUPLICATES skipped)
  list(JOIN skipped ", " skipped)
  set(skipped " The search skipped ${skipped}.")
endif()
set(help "`tools/setup --cuda` installs what is missing; docs/gpu.md shows other ways.")

if(NOT LT_CUDA)
  message(STATUS "Building without CUDA: LT_CUDA is off")
elseif(NOT NVCC)
  find_file(driver version PATHS /proc/driver/nvidia NO_DEFAULT_PATH NO_CACHE)
  set(level STATUS)
  if(driver) # this machine has a GPU
    set(level WARNING)
  endif()
  message(${level}
    "Building without CUDA: nvcc of CUDA 12.0 or later was not found.${skipped} ${help}")
elseif(missing)
  list(JOIN missing " and " missing)
  message(WARNING "On GPUs, convolutions and matrix products will be slow: the build does not use "
    "cuDNN and cuBLASLt, because it did not find ${missing}.${skipped} ${help}")
else()
  read_version(version ${CUDNN_HEADERS}/cudnn_version.h CUDNN)
  set(line "CUDA ${NVCC_VERSION}, cuDNN ${version}, cuBLASLt")
  if(NCCL_LIBRARY)
    read_nccl_version(version ${NCCL_LIBRARY})
    string(APPEND line ", NCCL ${version}")
  else()
    string(APPEND line ", without NCCL: several GPUs sum gradients on the host, which is slow")
  endif()
  message(STATUS "${line}")
endif()
if(CMAKE_SCRIPT_MODE_FILE) # for tools/setup and the test
  foreach(name NVCC NVCC_VERSION NVCC_FLAGS NVCC_LINK CUBLASLT_HEADERS CUDA_HEADERS CUDNN_HEADERS
      NCCL_LIBRARY)
    message(STATUS "${name}=${${name}}")
  endforeach()
endif()
