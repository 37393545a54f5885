-- sources.lua - records the text of all Lua files that a script loads by require, dofile and
-- loadfile, so that ranks can compare them. The label of a file is its module, or its name without
-- the folder, because folders may differ between machines.

local sources = {texts = {}}   -- label, "module layers" or "file layers.lua" -> text
local texts = sources.texts

-- The text of a file, or nil if it cannot be read.
function sources.read(path)
  local file = type(path) == "string" and io.open(path, "rb")
  local text = file and file:read "a"
  if file then file:close() end
  return text
end

-- Records a text. A second file of the same name gets the label "file layers.lua (2)".
local function keep(label, text)
  local name, n = label, 1
  while texts[name] and texts[name] ~= text do
    n = n + 1
    name = ("%s (%d)"):format(label, n)
  end
  texts[name] = text
end

-- Whether text was read, is Lua source and is allowed by mode. In all other cases the callers use
-- Lua's own functions, for their error messages.
local function is_source(text, mode)
  return text and not text:find "^\27" and (mode == nil or tostring(mode):find "t")
end

-- Like loadfile, for a file whose text was read. The file may be a pipe, so it is not read again.
local function load_text(path, text, ...)
  keep("file " .. path:match "[^/]*$", text)
  return load(text:gsub("^\xef\xbb\xbf", ""):gsub("^#[^\n]*", ""), "@" .. path, ...)
end

-- Starts recording: replaces the searcher of require, loadfile and dofile.
function sources.track()
  local search, load_file, do_file = package.searchers[2], loadfile, dofile
  package.searchers[2] = function(module)
    local loader, path = search(module)
    local text = type(loader) == "function" and sources.read(path)
    if text then keep("module " .. module, text) end
    return loader, path
  end
  function loadfile(path, ...)
    local text = sources.read(path)
    if not is_source(text, ...) then return load_file(path, ...) end
    return load_text(path, text, ...)
  end
  function dofile(path)
    local text = sources.read(path)
    if not is_source(text) then return do_file(path) end
    local chunk, why = load_text(path, text)
    if not chunk then error(why, 0) end
    return chunk()
  end
end

return sources
